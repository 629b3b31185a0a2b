"""The page that compares the completions of two versions, of this run or of two, for the same prompts.

Guarantee: held-out prompts are compared answer by answer, as the trainer kept them; prompts of the training set by their mean
rewards over two ranges of versions. Texts are those of the journals and of these answers; the means are those of the indexes, and
of their state when the page is made.
"""

from heapq import nsmallest
from typing import Any, NamedTuple
from urllib.parse import urlencode

import apsw
from starlette.requests import Request
from starlette.responses import Response

from consumer.evaluate.kept_answers import NEWEST, KeptAnswer, kept_versions, read_answers
from slipstream.run_reader import EVALUATIONS
from slipstream_extras.view.index.cache import answer
from slipstream_extras.view.index.rows import UNSCORED
from slipstream_extras.view.index.steps import lines_since
from slipstream_extras.view.index.texts import Progress, progress
from slipstream_extras.view.pages import forms
from slipstream_extras.view.pages.charts import as_json, compared
from slipstream_extras.view.pages.group import GroupPage
from slipstream_extras.view.server.rendering import page
from slipstream_extras.view.server.viewer import Viewer

MOST = 200


class Compared(NamedTuple):
    """Mean rewards of one prompt's groups, or its scores."""

    prompt: int
    before: float
    after: float
    newest_before: int  # the newest group of each, or the answer
    newest_after: int


Versions = tuple[int, int]  # both included
Means = dict[int, tuple[float, int]]  # by prompt: mean reward and newest group, or score and answer


def attempts(db: apsw.Connection, prompt: int) -> list[int]:
    """The newest groups of a prompt, oldest first."""
    found = answer(db, "SELECT seq FROM groups WHERE prompt = ? ORDER BY seq DESC LIMIT ?", (prompt, MOST))
    return [seq for (seq,) in reversed(found)]


def by_version(db: apsw.Connection, prompt: int) -> list[tuple[int, int, float]]:
    """Version, number of scored groups and their mean reward, newest version last."""
    sql = """SELECT version, count(*), avg(reward) FROM groups INDEXED BY groups_by_prompt WHERE prompt = ? AND reward > ?
        GROUP BY version ORDER BY version DESC LIMIT ?"""
    return answer(db, sql, (prompt, UNSCORED, MOST))[::-1]


def mean_rewards(db: apsw.Connection, versions: Versions) -> Means:
    """Return means of the prompts that these versions answered."""
    sql = (
        "SELECT prompt, avg(reward), max(seq) FROM groups WHERE version BETWEEN ? AND ? AND reward > ? GROUP BY prompt"
    )
    return {prompt: (mean, newest) for prompt, mean, newest in answer(db, sql, (*versions, UNSCORED))}


def compare(before: Means, after: Means, *, gained: bool) -> list[Compared]:
    """The prompts that both answered. The greatest change in this direction comes first."""
    both = (
        Compared(prompt, old, after[prompt][0], seq, after[prompt][1])
        for prompt, (old, seq) in before.items()
        if prompt in after
    )
    changed = [one for one in both if (one.after > one.before if gained else one.after < one.before)]
    return nsmallest(MOST, changed, key=lambda one: (-abs(one.after - one.before), one.prompt))


_EVALUATION_BYTES = 4 * 2**20
_MOST_STEPS, _STEP_BYTES = 4_000, 2**20
_LAST = 2**62


class Text(NamedTuple):
    """A side of the comparison."""

    reward: float
    shown: GroupPage | None  # None: it is gone, or was not kept


class Changes(NamedTuple):
    lost: list[Compared]
    gained: list[Compared]
    num_common: int

    def of(self, prompt: int | None) -> Compared | None:
        return next((one for one in (*self.lost, *self.gained) if one.prompt == prompt), None)


class Side(NamedTuple):
    viewer: Viewer
    versions: Versions
    means: Means
    done: Progress
    dataset: str | None
    held_out_dataset: str | None
    kept: list[int]  # versions whose answers are kept
    held_out: int | None  # the newest of them in the range
    answers: list[KeptAnswer]  # its

    @property
    def text(self) -> str:
        first, last = self.versions
        return f"{first}:{'' if last >= _LAST else last}"

    @property
    def scores(self) -> Means:
        return {one.prompt_id: (one.score, n) for n, one in enumerate(self.answers) if one.score is not None}

    def of_group(self, seq: int) -> GroupPage | None:
        with self.viewer.journal() as reader:
            rows = reader.rows_of([seq])
            return self.viewer.shown(reader, rows[0]) if rows else None

    def of_answer(self, number: int) -> GroupPage | None:
        return self.viewer.shown_answer(self.answers[number])

    def evaluation(self) -> dict[str, Any] | None:
        """The newest one of these versions."""
        lines = self.viewer.run.newest_lines(EVALUATIONS, _EVALUATION_BYTES)
        first, last = self.versions
        found = [line for line in lines if isinstance(line.get("version"), int) and first <= line["version"] <= last]
        return found[-1] if found else None


class ComparePages:
    """`other` is another run, whose versions can come before those of this one."""

    def __init__(self, viewer: Viewer, other: Viewer | None) -> None:
        self._viewer, self._other = viewer, other

    def compare(self, request: Request) -> Response:
        query = request.query_params
        before, after, with_other = self._sides(request)
        trained, held_out = _changes(before.means, after.means), _changes(before.scores, after.scores)
        chosen, held = trained.of(forms.whole(query, "prompt")), held_out.of(forms.whole(query, "held"))
        pairs: dict[str, list[Text]] = {"trained": [], "held_out": []}
        if chosen:
            pairs["trained"] = [Text(chosen.before, before.of_group(chosen.newest_before)),
                                Text(chosen.after, after.of_group(chosen.newest_after))]  # fmt: skip
        if held:
            pairs["held_out"] = [Text(held.before, before.of_answer(held.newest_before)),
                                 Text(held.after, after.of_answer(held.newest_after))]  # fmt: skip
        fields = {"a": before.text, "b": after.text} | ({} if with_other else {"with": "this"})
        return page(
            request, "compare.html", self._viewer.name, before=before, after=after, trained=trained, held_out=held_out,
            most=MOST, newest=NEWEST, chosen=chosen, held=held, pairs=pairs, query=urlencode(fields),
            evaluations=[before.evaluation(), after.evaluation()], other=self._other.name if self._other else None,
            with_other=with_other, done=min(before.done, after.done), charts=self._charts() if with_other else [],
        )  # fmt: skip

    def _charts(self) -> list[dict[str, Any]]:
        """Both runs in one chart each."""
        viewers = [viewer for viewer in (self._other, self._viewer) if viewer]
        names = [viewer.name for viewer in viewers]
        if len({*names}) < len(names):
            names = [str(viewer.run.folder) for viewer in viewers]
        lines = [(_steps_of(viewer), viewer.run.newest_lines(EVALUATIONS, _EVALUATION_BYTES)) for viewer in viewers]
        return as_json(compared(dict(zip(names, lines, strict=True))))

    def _sides(self, request: Request) -> tuple[Side, Side, bool]:
        """Return both sides, and whether the first is the other run."""
        query = request.query_params
        first, last = forms.versions(query, "a"), forms.versions(query, "b")
        if self._other is not None and query.get("with") != "this":
            return _side(self._other, first or (0, _LAST)), _side(self._viewer, last or (0, _LAST)), True
        with self._viewer.journal() as reader:
            newest = policy.version if (policy := reader.policy_at(_LAST)) else 0
        half, kept = newest // 2, list(kept_versions(self._viewer.run.folder))
        if len(kept) > 1:  # both ranges have one
            half = min(max(half, kept[0]), kept[-1] - 1)
        before, after = _side(self._viewer, first or (0, half)), _side(self._viewer, last or (half + 1, newest))
        return before, after, False


def _steps_of(viewer: Viewer) -> list[dict[str, Any]]:
    with viewer.index() as db:
        return lines_since(db, 0.0, _MOST_STEPS) if db else viewer.run.newest_steps(_STEP_BYTES)


def _changes(before: Means, after: Means) -> Changes:
    lost, gained = (compare(before, after, gained=way) for way in (False, True))
    return Changes(lost, gained, len(before.keys() & after.keys()))


def _side(viewer: Viewer, versions: Versions) -> Side:
    with viewer.journal() as reader, viewer.index() as db:
        means = mean_rewards(db, versions) if db else {}
        facts, done = reader.facts(), progress(db, reader.bounds()[1])
    kept = kept_versions(viewer.run.folder)
    inside = [version for version in kept if versions[0] <= version <= versions[1]]
    newest = inside[-1] if inside else None
    return Side(
        viewer, versions, means, done, facts.get("dataset_digest"), facts.get("held_out_digest"), list(kept), newest,
        read_answers(kept[newest]) if newest is not None else [],
    )  # fmt: skip
