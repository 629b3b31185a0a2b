"""The pages that follow prompts through the run: the history of one, and what two ranges of versions made of the same ones.

Guarantee: the texts are those of the journal; the means are those of the index, and of its state when the page is made.
"""

from itertools import islice
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from replay.journal.reader import JournalReader
from replay.journal.rows import GroupRow
from tools.journal.content import ContentReader
from tools.run_reader import EVALUATIONS
from tools.view.index.prompts import MOST, Versions, attempts, by_version, compare
from tools.view.index.texts import progress
from tools.view.pages import forms
from tools.view.pages.group import GroupPage, group_page
from tools.view.server.rendering import page
from tools.view.server.viewer import Viewer

_EVALUATION_BYTES = 4 * 2**20


class HistoryPages:
    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer

    def prompt(self, request: Request) -> Response:
        prompt = request.path_params["prompt"]
        with self._viewer.journal() as reader, self._viewer.index() as db:
            rows = reader.rows_of(attempts(db, prompt)) if db else []
            letters = [letter for letter in reader.dead_letters() if letter.prompt_id == prompt][-MOST:]
            return page(
                request, "prompt.html", self._viewer.name, prompt=prompt, rows=rows, letters=letters, most=MOST,
                shown=self._shown(reader, rows[-1]) if rows else None, versions=by_version(db, prompt) if db else [],
                done=progress(db, reader.bounds()[1]),
            )  # fmt: skip

    def compare(self, request: Request) -> Response:
        query = request.query_params
        with self._viewer.journal() as reader, self._viewer.index() as db:
            newest = max((policy.version for policy in reader.policies()), default=0)
            before = forms.versions(query, "a") or (0, max(0, newest // 2))
            after = forms.versions(query, "b") or (newest // 2 + 1, newest)
            lost, gained = ([] if db is None else compare(db, before, after, gained=way) for way in (False, True))
            chosen = {one.prompt: one for one in [*lost, *gained]}.get(forms.whole(query, "prompt") or 0)
            pair = reader.rows_of([chosen.seq_before, chosen.seq_after]) if chosen else []
            fields = {"a": _text(before), "b": _text(after)}
            return page(
                request, "compare.html", self._viewer.name, before=fields["a"], after=fields["b"], lost=lost, gained=gained,
                chosen=chosen, pair=[found for row in pair if (found := self._shown(reader, row))], query=urlencode(fields),
                evaluations=self._evaluations(before, after), most=MOST, done=progress(db, reader.bounds()[1]),
            )  # fmt: skip

    def _shown(self, reader: JournalReader, row: GroupRow) -> GroupPage | None:
        facts = reader.facts()
        content = ContentReader(reader).read(row)
        decoder, _ = self._viewer.decoder(facts)
        return group_page(row, content, facts, decoder, "logprob", raw=False, first=0) if content else None

    def _evaluations(self, *sides: Versions) -> list[dict[str, Any] | None]:
        """The newest evaluation of each."""
        lines = self._viewer.run.newest_lines(EVALUATIONS, _EVALUATION_BYTES)[::-1]
        return [next(islice((line for line in lines if _within(line.get("version"), side)), 1), None) for side in sides]


def _within(version: Any, side: Versions) -> bool:
    return isinstance(version, int) and side[0] <= version <= side[1]


def _text(versions: Versions) -> str:
    return f"{versions[0]}:{versions[1]}"
