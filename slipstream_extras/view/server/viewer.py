"""The source of all pages: the run's files, the index, the tokenizer, the daemons.

Guarantee: a journal or an index is open for one page at a time and closed with it. The daemons are asked once for all who want to
know within `_FRESH_S`.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

import apsw

from consumer.evaluate.kept_answers import KeptAnswer
from protocol.errors import JournalError
from protocol.wire.codec import CodecError
from protocol.wire.messages import MissingReward
from replay.credit import CreditRecipe
from replay.groups import InvalidGroupError, RolloutGroup
from replay.journal.reader import JournalReader
from replay.journal.schema import GroupRow
from slipstream.decoder import Decoder, find_decoder
from slipstream.journal.content import Content, ContentReader, content_of, reward_names
from slipstream.run_reader import JOURNAL, RunReader
from slipstream.status.reading import View
from slipstream.status.watch import Watch
from slipstream_extras.view.index.builder import Builder
from slipstream_extras.view.index.cache import opened, place_of
from slipstream_extras.view.index.reading import Worth, worth_reading
from slipstream_extras.view.pages.brief import NOTHING, Brief, brief
from slipstream_extras.view.pages.credit import Credit
from slipstream_extras.view.pages.group import Colour, GroupPage, group_page

_FRESH_S = 1.5


class Viewer:
    """The run in `place`, a folder or a journal file. `tokenizer` is the folder of its tokenizer, if it is not where the run had
    it."""

    def __init__(self, place: Path, tokenizer: Path | None = None) -> None:
        self.run = RunReader(place)
        self._journal = place if place.is_file() else place / JOURNAL
        self._index = place_of(self._journal)
        self._tokenizer = tokenizer
        self._decoder: tuple[str, Decoder] | None = None  # with the digest of its tokenizer
        self._watch, self._looking = Watch(self.run, []), threading.Lock()
        self._seen: tuple[float, View] | None = None

    @property
    def name(self) -> str:
        return self.run.folder.resolve().name

    def builder(self) -> Builder:
        """Build the index of this run."""
        return Builder(self.run, self._index, lambda facts: self.decoder(facts)[0])

    def journal(self) -> AbstractContextManager[JournalReader]:
        """`JournalError` if there is none."""
        return closing(self.run.journal())

    @contextmanager
    def journal_if_any(self) -> Iterator[JournalReader | None]:
        """Open the journal; None where none is there yet. `JournalError` if it cannot be read."""
        if not self._journal.is_file():
            yield None
            return
        with self.journal() as reader:
            yield reader

    def index(self) -> AbstractContextManager[apsw.Connection | None]:
        return opened(self._index)

    def decoder(self, facts: dict[str, str]) -> tuple[Decoder | None, str]:
        """The decoder of the run, and why there is none."""
        digest = facts.get("tokenizer_digest", "")
        if self._decoder is None or self._decoder[0] != digest:
            decoder, problem = find_decoder(facts, self._tokenizer)
            if decoder is None:
                return None, problem
            self._decoder = (digest, decoder)
        return self._decoder[1], ""

    def shown(self, reader: JournalReader, row: GroupRow) -> GroupPage | None:
        """A group as it is shown beside others; None if retention has deleted it meanwhile."""
        contents = ContentReader(reader)
        if (content := contents.read(row)) is None:
            return None
        return self._beside(content, reader.facts(), contents.missing(row), credit_of(reader, row, content.group))

    def shown_answer(self, answer: KeptAnswer) -> GroupPage | None:
        """An answer of an evaluation, likewise; None if it was not kept, or cannot be read."""
        with self.journal() as reader:
            facts = reader.facts()
        try:
            content = content_of(answer.frame, reward_names(facts)) if answer.frame else None
        except (CodecError, InvalidGroupError):
            return None
        return self._beside(content, facts, content.message.missing) if content else None

    def briefs(self, reader: JournalReader, rows: Sequence[GroupRow]) -> list[tuple[GroupRow, Brief]]:
        """Read the beginnings of these groups; a group that is damaged, or gone meanwhile, has none."""
        facts, contents = reader.facts(), ContentReader(reader)
        decoder, found = self.decoder(facts)[0], []
        for row in rows:
            with suppress(JournalError):
                if (content := contents.read(row)) is not None:
                    found.append((row, brief(content, facts, decoder)))
                    continue
            found.append((row, NOTHING))
        return found

    def worth_reading(self) -> list[tuple[Worth, GroupRow, Brief]]:
        """Return the groups to read first; none before there is a journal and an index."""
        with self.journal_if_any() as reader, self.index() as db:
            worth = {one.seq: one for one in worth_reading(db)} if reader and db else {}
            briefs = self.briefs(reader, reader.rows_of(worth)) if reader else []
        return [(worth[row.seq], row, shown) for row, shown in briefs]

    def _beside(
        self, content: Content, facts: dict[str, str], missing: Sequence[MissingReward], credit: Credit | None = None
    ) -> GroupPage:
        colour: Colour = "advantage" if credit else "logprob"
        decoder = self.decoder(facts)[0]
        return group_page(content, facts, decoder, colour, raw=False, first=0, missing=missing, credit=credit)

    def status(self) -> View:
        """Return the view of the daemons, at most some seconds old."""
        with self._looking:
            if self._seen is None or time.monotonic() - self._seen[0] > _FRESH_S:
                view = self._watch.look()
                self._seen = (time.monotonic(), view)
            return self._seen[1]


def written_at(path: Path) -> float:
    """Unix time; 0 if the file is not there any more."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def credit_of(reader: JournalReader, row: GroupRow, group: RolloutGroup) -> Credit | None:
    """Return what rewards of spans credit, where the run uses them and the group has some: by the recipe of the start that
    trained it, or of the newest."""
    facts = reader.facts()
    trained_by = [said for since, said in json.loads(facts.get("credits", "[]")) if since < (row.step or 0)]
    said = trained_by[-1] if trained_by else facts.get("credit")
    if not said or group.credit is None:
        return None
    batch = next(reader.batches(row.step), None) if row.step is not None else None
    known = reader.advantages(batch, row.step) if batch and row.step is not None and batch.step <= row.step else {}
    return Credit.of(group, CreditRecipe(**json.loads(said)), known.get(row.lease_id))
