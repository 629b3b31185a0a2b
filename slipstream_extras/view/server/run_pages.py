"""The pages of the run as a whole: its present state, its curves, its steps, its policies.

Guarantee: a page reads at most `_TIMELINE_BYTES` of each timeline, and of a long run as many steps as it shows.
"""

import io
import time
from typing import Any

import apsw
from msgspec.structs import replace
from rich.console import Console
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protocol.errors import JournalError
from replay.journal.schema import GroupRow, PolicyRow
from slipstream.run_reader import EVALUATIONS, Line
from slipstream.status.render import render
from slipstream.status.sentences import sentences
from slipstream.status.warnings import warnings
from slipstream_extras.view.index.cache import answer
from slipstream_extras.view.index.steps import ends, line_of, lines_since, newest_lines, times_since
from slipstream_extras.view.pages import forms
from slipstream_extras.view.pages.charts import MOST_PRODUCERS, By, as_json, charts, lanes, span_of, staleness_shares
from slipstream_extras.view.pages.steps import COLUMNS, policy_rows, sorted_steps
from slipstream_extras.view.server.rendering import fragment, page
from slipstream_extras.view.server.viewer import Viewer, written_at

_TIMELINE_BYTES = 2**20  # of one producer, more than two hours
_EVALUATION_BYTES = 4 * 2**20
_MOST_STEPS, _MOST_DRAWN, _STALENESS_STEPS = 20_000, 4_000, 200
_MINUTES, _DEFAULT_MINUTES = (5, 15, 60, 0), {"step": 0, "time": 60}  # 0: all of it
_STATUS_WIDTH = 110


class RunPages:
    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer

    def run(self, request: Request) -> Response:
        by, minutes = _by(request), _minutes(request)
        is_shared = request.query_params.get("share") == "1"
        return page(
            request, "run.html", self._viewer.name, data=self._data(minutes, by), minutes=minutes, choices=_MINUTES, by=by,
            live=self._live() if is_shared else None, worth=self._viewer.worth_reading() if is_shared else None,
        )  # fmt: skip

    def live(self, request: Request) -> Response:
        """Show the part that changes from second to second."""
        return fragment("live.html", live=self._live())

    def numbers(self, request: Request) -> Response:
        return fragment("numbers.html", live=self._live())

    def worth(self, request: Request) -> Response:
        return fragment("worth.html", worth=self._viewer.worth_reading())

    def data(self, request: Request) -> Response:
        return JSONResponse(self._data(_minutes(request), _by(request)))

    def _live(self) -> dict[str, Any]:
        view = self._viewer.status()
        found = warnings(view)
        console = Console(width=_STATUS_WIDTH, no_color=True, record=True, file=io.StringIO())
        console.print(render(replace(view, at=0.0), [], _STATUS_WIDTH))  # the page says when itself
        text = console.export_text(styles=False)
        return {"view": view, "warnings": found, "said": sentences(view, found), "text": text, "at": time.time()}

    def _data(self, minutes: int, by: By) -> list[dict[str, Any]]:
        """The charts of the last `minutes` of the run, 0 for all of it. Only those by time have the timeline."""
        run = self._viewer.run
        producers = self._producers() if by == "time" else {}
        with self._viewer.index() as db:
            newest = [] if db else run.newest_steps(_TIMELINE_BYTES)
            span = span_of(ends(db) if db else newest, producers)
            if span is None:
                return []
            start = max(span[0], span[1] - 60 * minutes) if minutes else span[0]
            times = (times_since(db, start) if db else newest) if by == "time" else []
            steps = lines_since(db, start, _MOST_DRAWN) if db else newest
            scoring = _scoring(db, start, span[1]) if db and by == "time" else []
            ages = staleness_shares(steps, _versions_of_steps(db), by) if db else None
        shown = lanes(times, producers, scoring, start, span[1]) if by == "time" else []
        evaluations = run.newest_lines(EVALUATIONS, _EVALUATION_BYTES)
        found = charts(steps, evaluations, shown, (start, span[1]) if by == "time" else None, by)
        if ages:  # the timeline comes last
            found.insert(len(found) - sum(chart.lanes for chart in found), ages)
        return as_json(found)

    def _producers(self) -> dict[str, list[Line]]:
        """The ends of the timelines of the producers that wrote last, by their names."""
        run = self._viewer.run
        newest = sorted(run.timeline_names(), key=lambda name: -written_at(run.folder / name))[:MOST_PRODUCERS]
        found = {name: run.newest_lines(name, _TIMELINE_BYTES) for name in sorted(newest)}
        return {_producer_name(name, lines): lines for name, lines in found.items()}

    def steps(self, request: Request) -> Response:
        query = request.query_params
        with self._viewer.index() as db:
            lines = newest_lines(db, _MOST_STEPS) if db else self._viewer.run.newest_steps(_TIMELINE_BYTES)
        found = sorted_steps(lines, query)
        return page(request, "steps.html", self._viewer.name, found=found, columns=COLUMNS)

    def step(self, request: Request) -> Response:
        """The lineage of a step: its groups, and the policies that it began with and made."""
        step = request.path_params["step"]
        with self._viewer.journal() as reader:
            batch = next(reader.batches(step), None)
            if batch is None or batch.step > step:
                raise JournalError(
                    f"the journal holds no groups of step {step}: it was not taken yet, or retention has deleted them"
                )
            began = reader.policy_at(batch.step - 1)
            made = reader.policy_at(step)
            advantages = reader.advantages(batch, step)
            rows = [row for lease_id in batch.lease_ids if (row := reader.row(lease_id)) is not None]
            briefs = self._viewer.briefs(reader, rows)
        with self._viewer.index() as db:
            line = {"step": step} | (line_of(db, step) if db else {})
        return page(
            request, "step.html", self._viewer.name, step=step, batch=batch, began=began,
            made=made if made and made.step == step else None, line=line,
            rows=[(row, shown, _staleness(row, began), advantages.get(row.lease_id)) for row, shown in briefs],
        )  # fmt: skip

    def policies(self, request: Request) -> Response:
        run = self._viewer.run
        with self._viewer.journal() as reader:
            newest = list(reader.policies())[-2_000:]
        timelines = {name: run.newest_lines(name, _TIMELINE_BYTES) for name in run.timeline_names()}
        rows = policy_rows(newest, timelines, run.newest_lines(EVALUATIONS, _EVALUATION_BYTES))
        folders = [name for name in ("adapter", "model", "checkpoints/best") if (run.folder / name).is_dir()]
        return page(
            request, "policies.html", self._viewer.name, rows=rows, folders=[run.folder / name for name in folders]
        )


def _by(request: Request) -> By:
    return "time" if forms.choice(request.query_params, "by", ("step", "time")) == "time" else "step"


def _minutes(request: Request) -> int:
    minutes = forms.whole(request.query_params, "minutes")
    return _DEFAULT_MINUTES[_by(request)] if minutes is None else max(0, min(minutes, 10**6))


def _producer_name(file: str, lines: list[Line]) -> str:
    starts = [line.get("name") for line in lines if line.get("event") == "start"]
    return str(starts[-1]) if starts else file.removeprefix("producer-").removesuffix(".jsonl")


def _scoring(db: apsw.Connection, start: float, end: float) -> list[Any]:
    """Return when the newest groups arrived, and for how long each was scored."""
    newest = "SELECT arrived, scoring_s FROM groups ORDER BY seq DESC LIMIT 20000"
    sql = f"SELECT * FROM ({newest}) WHERE scoring_s > 0 AND arrived BETWEEN ? AND ?"  # noqa: S608
    return answer(db, sql, (start, end))


def _versions_of_steps(db: apsw.Connection) -> list[Any]:
    """Return step, version and number of groups of the newest steps."""
    newest = f"(SELECT coalesce(max(step), 0) - {_STALENESS_STEPS} FROM groups)"  # noqa: S608
    sql = f"SELECT step, version, count(*) FROM groups WHERE step > max(0, {newest}) GROUP BY step, version"  # noqa: S608
    return answer(db, sql)


def _staleness(row: GroupRow, began: PolicyRow | None) -> int | None:
    return None if began is None else began.version - row.policy_version
