"""The words of prompts and completions, for the search.

Guarantee: groups are read once, in order of arrival; groups of a committed transaction are not read again after a kill. Of
one group at most `_MAX_CHARS` are searched. A group that cannot be read or decoded has no words, and hinders no other.
"""

from collections.abc import Iterator
from itertools import accumulate, islice
from typing import NamedTuple

import apsw

from protocol.errors import JournalError
from replay.journal.reader import JournalReader
from replay.journal.schema import GroupRow
from slipstream.decoder import Decoder
from slipstream.journal.content import Content, ContentReader
from slipstream_extras.view.index.cache import answer

_GROUPS, _TOKENS = 2_000, 500_000  # of one transaction, at most, but for a group that alone has more
_MAX_CHARS = 2**20
_UPDATE = "UPDATE groups SET longest = ?, truncated = ?, scoring_s = ?, spread = ? WHERE seq = ?"


class TextIndex:
    """Write the table `texts`, and into `groups` the values that only a group's body has. Belongs to one thread.
    Without `decoder` there are no words."""

    def __init__(self, db: apsw.Connection, decoder: Decoder | None) -> None:
        self._db = db
        self._decoder = decoder

    def add(self, reader: JournalReader) -> bool:
        """Index the next groups that have a row; return whether there may be more."""
        bounds = self._next()
        if bounds is None:
            return False
        contents, facts = ContentReader(reader), reader.facts()
        found = [(row.seq, read) for row in reader.rows_between(*bounds) if (read := _read(contents, row))]
        texts = self._texts([content for _, content in found])
        with self._db:
            for (seq, content), text in zip(found, texts, strict=True):
                self._db.execute(_UPDATE, (*_numbers(content, facts), seq))
                if text:
                    self._db.execute("INSERT OR REPLACE INTO texts(rowid, text) VALUES(?, ?)", (seq, text))
            self._db.execute("INSERT OR REPLACE INTO facts VALUES('texts', ?)", (bounds[1],))
        return True

    def _next(self) -> tuple[int, int] | None:
        """The first and the last sequence number of the next groups."""
        done = "coalesce((SELECT value FROM facts WHERE name = 'texts'), 0)"
        sql = f"SELECT seq, tokens FROM groups WHERE seq > {done} ORDER BY seq LIMIT ?"  # noqa: S608
        rows = answer(self._db, sql, (_GROUPS,))
        if not rows:
            return None
        totals = accumulate(tokens for _, tokens in rows)
        fitting = [seq for (seq, _), total in zip(rows, totals, strict=True) if total <= _TOKENS]
        return rows[0][0], (fitting or [rows[0][0]])[-1]

    def _texts(self, contents: list[Content]) -> list[str]:
        """The text of each group."""
        if self._decoder is None:
            return [""] * len(contents)
        sequences = [_sequences(content) for content in contents]
        decoded = iter(self._decoder.texts([ids for sequence in sequences for ids in sequence]))
        return ["\n".join(islice(decoded, len(sequence)))[:_MAX_CHARS] for sequence in sequences]


def _sequences(content: Content) -> list[list[int]]:
    """The ids of prompt and records."""
    group = content.group
    return [group.prompt_ids.tolist(), *(group.completion_ids[record].tolist() for record in group.records)]


def _numbers(content: Content, facts: dict[str, str]) -> tuple[int, int, float, float | None]:
    group = content.group
    known = [total for total in content.totals(facts) if total is not None]
    spread = max(known) - min(known) if known else None
    return int(group.longest_lengths.max()), int(group.was_truncated.sum()), content.message.reward_s, spread


def _read(contents: ContentReader, row: GroupRow) -> Content | None:
    try:
        return contents.read(row)
    except JournalError:
        return None


def words(query: str) -> Iterator[str]:
    """Yield the terms for SQLite's full-text search: every word, or every "quoted phrase", must be there."""
    for index, part in enumerate(query.split('"')):
        for word in [part.strip()] if index % 2 else part.split():
            if any(character.isalnum() for character in word):
                yield f'"{word}"'


class Progress(NamedTuple):
    rows: float  # share of the journal's groups that can be filtered and sorted, 0 to 1
    texts: float  # that can be searched


def progress(db: apsw.Connection | None, newest: int) -> Progress:
    """Return the share of a journal that is in the index; its newest group is `newest`."""
    if db is None or not newest:
        return Progress(0.0, 0.0)
    (rows,), (texts,) = answer(
        db, "SELECT max(seq) FROM groups UNION ALL SELECT (SELECT value FROM facts WHERE name = 'texts')"
    )
    return Progress(min(1.0, (rows or 0) / newest), min(1.0, (texts or 0) / newest))
