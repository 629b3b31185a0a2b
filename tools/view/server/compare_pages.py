"""The page that compares: what two ranges of policy versions, of this run or of two, made of the same prompts.

Guarantee: the texts are those of the journals; the means are those of the indexes, and of their state when the page is made.
"""

from typing import Any, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from tools.run_reader import EVALUATIONS
from tools.view.index.prompts import MOST, Means, Versions, compare, mean_rewards
from tools.view.index.texts import Progress, progress
from tools.view.pages import forms
from tools.view.pages.group import GroupPage
from tools.view.server.rendering import page
from tools.view.server.viewer import Viewer

_EVALUATION_BYTES = 4 * 2**20
_LAST = 2**62


class Side(NamedTuple):
    viewer: Viewer
    versions: Versions
    means: Means
    done: Progress
    dataset: str | None

    @property
    def text(self) -> str:
        first, last = self.versions
        return f"{first}:{'' if last >= _LAST else last}"

    def shown(self, seq: int) -> GroupPage | None:
        with self.viewer.journal() as reader:
            rows = reader.rows_of([seq])
            return self.viewer.shown(reader, rows[0]) if rows else None

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
        with_other = self._other is not None and query.get("with") != "this"
        if with_other and self._other is not None:
            before = _side(self._other, forms.versions(query, "a") or (0, _LAST))
            after = _side(self._viewer, forms.versions(query, "b") or (0, _LAST))
        else:
            with self._viewer.journal() as reader:
                newest = policy.version if (policy := reader.policy_at(_LAST)) else 0
            before = _side(self._viewer, forms.versions(query, "a") or (0, newest // 2))
            after = _side(self._viewer, forms.versions(query, "b") or (newest // 2 + 1, newest))
        lost, gained = (compare(before.means, after.means, gained=way) for way in (False, True))
        prompt = forms.whole(query, "prompt")
        chosen = {one.prompt: one for one in [*lost, *gained]}.get(-1 if prompt is None else prompt)
        fields = {"a": before.text, "b": after.text} | ({} if with_other else {"with": "this"})
        return page(
            request, "compare.html", self._viewer.name, before=before, after=after, lost=lost, gained=gained, most=MOST,
            chosen=chosen, pair=[before.shown(chosen.seq_before), after.shown(chosen.seq_after)] if chosen else [],
            query=urlencode(fields), evaluations=[before.evaluation(), after.evaluation()],
            other=self._other.name if self._other else None, with_other=with_other,
            done=min(before.done, after.done),
        )  # fmt: skip


def _side(viewer: Viewer, versions: Versions) -> Side:
    with viewer.journal() as reader, viewer.index() as db:
        means = mean_rewards(db, versions) if db else {}
        return Side(viewer, versions, means, progress(db, reader.bounds()[1]), reader.facts().get("dataset_digest"))
