"""A page of a list of groups: its groups, their order, and where the pages before and behind it begin.

Guarantee: a page takes the same time wherever it is, because it begins at a value and not at a number of rows; no value of a
request becomes part of a statement. Of the groups that have the words of a search the newest `MOST_FOUND` are listed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import apsw

from replay.journal.schema import STATES
from slipstream_extras.view.index.cache import answer
from slipstream_extras.view.index.rows import UNSCORED, VERDICTS
from slipstream_extras.view.index.texts import words

Sort = Literal["arrival", "reward", "tokens", "version", "step"]
SORTS: tuple[Sort, ...] = get_args(Sort)
MOST_FOUND = 50_000
_COLUMN = {"arrival": "seq"}


class Cursor(NamedTuple):
    """The beginning of a page: behind (or, going back, before) the group `seq`, whose value of the sorted column is `value`."""

    value: float
    seq: int
    back: bool = False


@dataclass(frozen=True)
class Wanted:
    """The wanted groups and their order. Bounds are inclusive; None does not restrict."""

    state: str | None = None
    verdict: str | None = None
    producer: str | None = None
    prompt: int | None = None
    least_prompt: int | None = None  # of a source
    most_prompt: int | None = None
    least_step: int | None = None
    most_step: int | None = None
    least_version: int | None = None
    most_version: int | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    least_tokens: int | None = None
    most_tokens: int | None = None
    least_length: int | None = None  # of the longest completion, in tokens
    most_length: int | None = None
    replayed: bool | None = None
    truncated: bool | None = None
    text: str = ""
    sort: Sort = "arrival"
    ascending: bool = False

    @property
    def needs_texts(self) -> bool:
        """Return whether it filters by columns that are indexed with the texts."""
        return bool(self.text) or any(
            value is not None for value in (self.truncated, self.least_length, self.most_length)
        )

    @property
    def is_plain(self) -> bool:
        """Return whether it is every group in order of arrival, which needs no index."""
        return self == Wanted(ascending=self.ascending)


class Page(NamedTuple):
    seqs: list[int]
    before: Cursor | None
    after: Cursor | None


def page(db: apsw.Connection, wanted: Wanted, cursor: Cursor | None, size: int) -> Page:
    """Return at most `size` groups."""
    column = _COLUMN.get(wanted.sort, wanted.sort)
    downwards = wanted.ascending == bool(cursor and cursor.back)
    where, bindings = _conditions(wanted)
    if cursor is not None:
        where.append(f"({column}, seq) {'<' if downwards else '>'} (:cursor_value, :cursor_seq)")
        bindings |= {"cursor_value": cursor.value, "cursor_seq": cursor.seq}
    way = "DESC" if downwards else "ASC"
    order = f"{column} {way}" + (f", seq {way}" if column != "seq" else "")
    sql = f"SELECT seq, {column} FROM {_source(wanted, where)} ORDER BY {order} LIMIT {size + 1}"  # noqa: S608
    found = answer(db, sql, bindings)
    has_more, found = len(found) > size, found[:size]
    if cursor is not None and cursor.back:
        found.reverse()
        has_before, has_after = has_more, True
    else:
        has_before, has_after = cursor is not None, has_more
    return Page(
        [seq for seq, _ in found],
        Cursor(found[0][1], found[0][0], back=True) if found and has_before else None,
        Cursor(found[-1][1], found[-1][0]) if found and has_after else None,
    )


def neighbours(db: apsw.Connection, wanted: Wanted, seq: int) -> tuple[int | None, int | None]:
    """The groups before and behind this one in the list; None where there is none, or the index does not know this one."""
    column = _COLUMN.get(wanted.sort, wanted.sort)
    found = answer(db, f"SELECT {column} FROM groups WHERE seq = ?", (seq,))  # noqa: S608
    if not found:
        return None, None
    pages = [page(db, wanted, Cursor(found[0][0], seq, back), 1).seqs for back in (True, False)]
    before, after = (seqs[0] if seqs else None for seqs in pages)
    return before, after


def _source(wanted: Wanted, where: list[str]) -> str:
    """The table and the conditions, and by which index it is read.

    With conditions that no index answers the whole table, whose rows are short, is read in its order: a walk along another order
    would look up each row, and take several times as long where few fit.
    """
    conditions = f" WHERE {' AND '.join(where)}" if where else ""
    if any(words(wanted.text)):
        found = "(SELECT rowid AS hit FROM texts WHERE texts MATCH :words ORDER BY rowid DESC LIMIT :most_found)"
        return f"{found} CROSS JOIN groups ON seq = hit{conditions}"
    if wanted.prompt is not None:
        return f"groups INDEXED BY groups_by_prompt{conditions}"
    is_filtered = any(":cursor" not in condition for condition in where)
    return f"groups{' NOT INDEXED' if is_filtered else ''}{conditions}"


def _conditions(wanted: Wanted) -> tuple[list[str], dict[str, Any]]:
    found = list(_filters(wanted))
    bindings: dict[str, Any] = {name: value for _, name, value in found}
    if matching := " ".join(words(wanted.text)):
        bindings |= {"words": matching, "most_found": MOST_FOUND}
    return [condition for condition, _, _ in found], bindings


def _filters(wanted: Wanted) -> Iterator[tuple[str, str, Any]]:
    """Condition, name and value of each."""
    if wanted.state in STATES:
        yield "state = :state", "state", STATES.index(wanted.state)
    if wanted.verdict in VERDICTS:
        yield "verdict = :verdict", "verdict", VERDICTS.index(wanted.verdict)
    if wanted.producer is not None:
        yield "producer = (SELECT id FROM producers WHERE name = :producer)", "producer", wanted.producer
    if wanted.replayed is not None:
        yield "(replays > 0) = :replayed", "replayed", int(wanted.replayed)
    if wanted.truncated is not None:
        yield "(truncated > 0) = :truncated", "truncated", int(wanted.truncated)
    if wanted.least_reward is not None or wanted.most_reward is not None:
        yield "reward > :unscored", "unscored", UNSCORED
    compared = {
        "prompt": "prompt =", "least_prompt": "prompt >=", "most_prompt": "prompt <=",
        "least_step": "last_step >=", "most_step": "step > 0 AND step <=",
        "least_version": "version >=", "most_version": "version <=", "least_reward": "reward >=",
        "most_reward": "reward <=", "least_tokens": "tokens >=", "most_tokens": "tokens <=",
        "least_length": "longest >=", "most_length": "longest <=",
    }  # fmt: skip
    for name, condition in compared.items():
        if (value := getattr(wanted, name)) is not None:
            yield f"{condition} :{name}", name, value
