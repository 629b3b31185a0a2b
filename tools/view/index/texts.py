"""The words of prompts and completions, for the search.

Guarantee: groups are read once, in order of arrival, and what a transaction took is not read again after a kill. Of one group at
most `_MAX_CHARS` are searched. A group that cannot be read or decoded has no words, and hinders no other.
"""

from collections.abc import Iterator
from typing import NamedTuple

import apsw

from protocol.errors import JournalError
from replay.journal.reader import JournalReader
from replay.journal.rows import GroupRow
from tools.journal.content import Content, ContentReader
from tools.view.index.cache import answer
from tools.view.index.decoder import Decoder

_GROUPS, _CHARS = 256, 4 * 2**20  # of one transaction, at most
_MAX_CHARS = 2**20

_UPDATE = "UPDATE groups SET longest = ?, truncated = ?, scoring_s = ? WHERE seq = ?"


class TextIndex:
    """Writes the table `texts`, and what only a group's body says into `groups`. Belongs to one thread. Without `decoder` there
    are no words."""

    def __init__(self, db: apsw.Connection, decoder: Decoder | None) -> None:
        self._db = db
        self._decoder = decoder
        self.num_chars = 0  # that this process has indexed

    @property
    def done(self) -> int:
        """Every group up to this sequence number is indexed."""
        found = answer(self._db, "SELECT value FROM facts WHERE name = 'texts'")
        return int(found[0][0]) if found else 0

    def add(self, reader: JournalReader) -> bool:
        """Indexes the next groups of those that have a row; returns whether there may be more."""
        done = self.done
        rows = self._next(reader, done)
        if not rows:
            return False
        contents = ContentReader(reader)
        found, chars = [], 0
        for row in rows:
            read = _read(contents, row)
            text = self._text(read) if read else ""
            found.append((row.seq, read, text))
            chars += len(text)
            if chars > _CHARS:
                break
        self._write(found)
        self.num_chars += chars
        return True

    def _next(self, reader: JournalReader, done: int) -> list[GroupRow]:
        sql = "SELECT seq FROM groups WHERE seq > ? ORDER BY seq LIMIT ?"
        seqs = [seq for (seq,) in answer(self._db, sql, (done, _GROUPS))]
        return reader.rows_of(seqs) or ([] if not seqs else self._skip(seqs[-1]))

    def _skip(self, seq: int) -> list[GroupRow]:
        """Retention deleted all of them."""
        self._db.execute("INSERT OR REPLACE INTO facts VALUES('texts', ?)", (seq,))
        return []

    def _write(self, found: list[tuple[int, Content | None, str]]) -> None:
        with self._db:
            for seq, content, text in found:
                if content is not None:
                    self._db.execute(_UPDATE, (*_numbers(content), seq))
                if text:
                    self._db.execute("INSERT OR REPLACE INTO texts(rowid, text) VALUES(?, ?)", (seq, text))
            self._db.execute("INSERT OR REPLACE INTO facts VALUES('texts', ?)", (found[-1][0],))

    def _text(self, content: Content) -> str:
        if self._decoder is None:
            return ""
        return "\n".join(self._decoder.texts(_parts(content)))[:_MAX_CHARS]


def _parts(content: Content) -> list[list[int]]:
    group = content.group
    return [group.prompt_ids.tolist(), *(group.completion_ids[record].tolist() for record in group.records)]


def _numbers(content: Content) -> tuple[int, int, float]:
    group = content.group
    return int(group.longest_lengths.max()), int(group.was_truncated.sum()), content.message.reward_s


def _read(contents: ContentReader, row: GroupRow) -> Content | None:
    try:
        return contents.read(row)
    except JournalError:
        return None


def words(query: str) -> Iterator[str]:
    """What SQLite's full-text search is asked for: every word, or every "quoted phrase", must be there."""
    for index, part in enumerate(query.split('"')):
        for word in [part.strip()] if index % 2 else part.split():
            if any(character.isalnum() for character in word):
                yield f'"{word}"'


class Progress(NamedTuple):
    rows: float  # share of the journal's groups that can be filtered and sorted, 0 to 1
    texts: float  # that can be searched


def progress(db: apsw.Connection | None, newest: int) -> Progress:
    """How much of a journal whose newest group is `newest` is in the index."""
    if db is None or not newest:
        return Progress(0.0, 0.0)
    (rows,), (texts,) = answer(
        db, "SELECT max(seq) FROM groups UNION ALL SELECT (SELECT value FROM facts WHERE name = 'texts')"
    )
    return Progress(min(1.0, (rows or 0) / newest), min(1.0, (texts or 0) / newest))
