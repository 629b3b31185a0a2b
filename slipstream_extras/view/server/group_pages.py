"""The pages of groups: the list, one group.

Guarantee: a page reads its groups from the journal when it is made; the index only finds them.
"""

from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from replay.journal.reader import JournalReader
from replay.journal.schema import STATES
from replay.sources import Sources
from slipstream.journal.content import ContentReader
from slipstream_extras.view.index.listing import MOST_FOUND, SORTS, Cursor, Page, Wanted, neighbours
from slipstream_extras.view.index.listing import page as page_of
from slipstream_extras.view.index.rows import VERDICTS
from slipstream_extras.view.index.texts import progress
from slipstream_extras.view.pages import forms
from slipstream_extras.view.pages.group import COLOURS, COMPLETIONS, group_page
from slipstream_extras.view.server.compare_pages import MOST, attempts, by_version
from slipstream_extras.view.server.rendering import page
from slipstream_extras.view.server.viewer import Viewer, credit_of

_ROWS = 50


class GroupPages:
    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer

    def groups(self, request: Request) -> Response:
        cursor, fields = forms.cursor_of(request.query_params), forms.list_fields(request.query_params)
        with self._viewer.journal_if_any() as reader:
            if reader is None:
                forms.wanted_of(request.query_params)
                return page(request, "groups.html", self._viewer.name, **_empty(fields))
            sources = Sources.of_facts(reader.facts())
            wanted = forms.wanted_of(request.query_params, sources)
            found, names = self._listed(reader, wanted, cursor)
            rows = reader.rows_of(found.seqs)
            oldest, newest = reader.bounds()
            with self._viewer.index() as db:
                done = progress(db, newest)
            return page(
                request, "groups.html", self._viewer.name, rows=self._viewer.briefs(reader, rows), fields=fields,
                query=urlencode(fields),
                deleted=len(found.seqs) - len(rows), done=done, states=STATES, verdicts=VERDICTS, sorts=SORTS,
                producers=names, sources=sources.names, newest=newest, most_found=MOST_FOUND if wanted.text else 0, wanted=wanted,
                num_deleted=reader.num_deleted() if oldest != 1 and newest else 0,
                before=forms.with_cursor(fields, found.before), after=forms.with_cursor(fields, found.after),
            )  # fmt: skip

    def _listed(self, reader: JournalReader, wanted: Wanted, cursor: Cursor | None) -> tuple[Page, list[str]]:
        with self._viewer.index() as db:
            names = [name for (name,) in db.execute("SELECT name FROM producers ORDER BY name LIMIT 500")] if db else []
            if not wanted.is_plain and db is not None:
                return page_of(db, wanted, cursor, _ROWS), names
        return (_in_order_of_arrival(reader, wanted, cursor) if wanted.is_plain else Page([], None, None)), names

    def group(self, request: Request) -> Response:
        query = request.query_params
        fields = forms.list_fields(query)
        colour = query.get("colour", "logprob")
        if colour not in COLOURS:
            raise forms.FormError(f"colour: expected one of {', '.join(COLOURS)} (got {colour[:40]!r})")
        first, raw = max(0, forms.whole(query, "first") or 0), query.get("raw") == "1"
        with self._viewer.journal() as reader:
            facts, row = reader.facts(), reader.row(query.get("id", ""))
            content = ContentReader(reader).read(row) if row is not None else None
            if row is None or content is None:
                return page(request, "missing.html", self._viewer.name, 404, group=query.get("id", ""))
            decoder, problem = self._viewer.decoder(facts)
            credit = credit_of(reader, row, content.group)
            told = {"advantage": credit, "teacher": content.message.teacher_logprobs}
            colours = [name for name in COLOURS if told.get(name, True)]
            seen = colour if colour in colours else "logprob"
            before, after = self._neighbours(reader, forms.wanted_of(query, Sources.of_facts(facts)), row.seq)
            missing = ContentReader(reader).missing(row)
            shown = group_page(content, facts, decoder, seen, raw=raw, first=first, missing=missing, credit=credit)
            here = fields | {"id": row.lease_id, "colour": colour} | ({"raw": "1"} if raw else {})
            return page(
                request, "group.html", self._viewer.name, shown=shown, row=row, problem=problem, colour=seen, raw=raw,
                colours={name: urlencode(here | {"colour": name}) for name in colours},
                next_colour=urlencode(here | {"colour": colours[(colours.index(seen) + 1) % len(colours)]}),
                raw_link=urlencode({**here, "raw": "0" if raw else "1"}),
                uses=list(reader.uses(of_group=row.lease_id)), per_page=COMPLETIONS,
                pages={start: urlencode(here | {"first": start}) for start in range(0, shown.num_completions, COMPLETIONS)},
                before=before and urlencode(here | {"id": before}), after=after and urlencode(here | {"id": after}),
            )  # fmt: skip

    def _neighbours(self, reader: JournalReader, wanted: Wanted, seq: int) -> tuple[str | None, str | None]:
        """The ids of the groups before and behind this one in its list."""
        if wanted.is_plain:
            newer, older = reader.seqs(after=seq, limit=1), reader.seqs(before=seq, limit=1)
            found = (older, newer) if wanted.ascending else (newer, older)
            seqs: list[int | None] = [seqs[0] if seqs else None for seqs in found]
        else:
            with self._viewer.index() as db:
                seqs = list(neighbours(db, wanted, seq)) if db else [None, None]
        rows = [reader.rows_of([seq]) if seq is not None else [] for seq in seqs]
        before, after = (found[0].lease_id if found else None for found in rows)
        return before, after


def _in_order_of_arrival(reader: JournalReader, wanted: Wanted, cursor: Cursor | None) -> Page:
    """List groups without the index."""
    ascending = wanted.ascending != bool(cursor and cursor.back)
    at = cursor.seq if cursor else (0 if ascending else None)
    seqs = reader.seqs(after=at or 0, limit=_ROWS + 1) if ascending else reader.seqs(before=at, limit=_ROWS + 1)
    has_more, seqs = len(seqs) > _ROWS, seqs[:_ROWS]
    back = bool(cursor and cursor.back)
    if back:
        seqs.reverse()
    has_before, has_after = (has_more, True) if back else (cursor is not None, has_more)
    return Page(
        seqs,
        Cursor(seqs[0], seqs[0], back=True) if seqs and has_before else None,
        Cursor(seqs[-1], seqs[-1]) if seqs and has_after else None,
    )


def _empty(fields: dict[str, str]) -> dict[str, Any]:
    return {
        "rows": [], "fields": fields, "query": "", "deleted": 0, "done": None, "states": STATES, "verdicts": VERDICTS,
        "sorts": SORTS, "producers": [], "sources": (), "newest": None, "most_found": 0, "wanted": Wanted(), "num_deleted": 0,
        "before": None, "after": None,
    }  # fmt: skip


class HistoryPages:
    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer

    def prompt(self, request: Request) -> Response:
        prompt = request.path_params["prompt"]
        with self._viewer.journal() as reader, self._viewer.index() as db:
            rows = reader.rows_of(attempts(db, prompt)) if db else []
            letters = [letter for letter in reader.dead_letters() if letter.prompt_id == prompt][-MOST:]
            return page(
                request, "prompt.html", self._viewer.name, prompt=prompt, rows=self._viewer.briefs(reader, rows),
                letters=letters, most=MOST, source=Sources.of_facts(reader.facts()).name_of(prompt),
                shown=self._viewer.shown(reader, rows[-1]) if rows else None,
                versions=by_version(db, prompt) if db else [], done=progress(db, reader.bounds()[1]),
            )  # fmt: skip
