"""Questions to the index about prompts: the attempts at one, and what two ranges of versions made of the same ones.

Guarantee: an answer has at most `MOST` rows.
"""

from typing import NamedTuple

import apsw

from tools.view.index.cache import answer
from tools.view.index.rows import UNSCORED

MOST = 200


class Compared(NamedTuple):
    """Mean rewards of one prompt's groups."""

    prompt: int
    before: float
    after: float
    seq_before: int  # the newest group of each
    seq_after: int


Versions = tuple[int, int]  # both included


def attempts(db: apsw.Connection, prompt: int) -> list[int]:
    """The newest groups of a prompt, oldest first."""
    found = answer(db, "SELECT seq FROM groups WHERE prompt = ? ORDER BY seq DESC LIMIT ?", (prompt, MOST))
    return [seq for (seq,) in reversed(found)]


def by_version(db: apsw.Connection, prompt: int) -> list[tuple[int, int, float]]:
    """Version, number of scored groups and their mean reward, newest version last."""
    sql = """SELECT version, count(*), avg(reward) FROM groups INDEXED BY groups_by_prompt WHERE prompt = ? AND reward > ?
        GROUP BY version ORDER BY version DESC LIMIT ?"""
    return answer(db, sql, (prompt, UNSCORED, MOST))[::-1]


def compare(db: apsw.Connection, before: Versions, after: Versions, *, gained: bool) -> list[Compared]:
    """The prompts that both answered, those that changed most in this direction first."""
    side = (
        "SELECT prompt, avg(reward) AS mean, max(seq) AS newest FROM groups"
        " WHERE version BETWEEN {} AND reward > :unscored GROUP BY prompt"
    )
    sql = f"""WITH old AS ({side.format(":a AND :b")}), new AS ({side.format(":c AND :d")})
        SELECT prompt, old.mean, new.mean, old.newest, new.newest FROM old JOIN new USING(prompt)
        WHERE {"new.mean > old.mean" if gained else "new.mean < old.mean"}
        ORDER BY abs(new.mean - old.mean) DESC, prompt LIMIT {MOST}"""  # noqa: S608
    bindings = dict(zip("abcd", (*before, *after), strict=True)) | {"unscored": UNSCORED}
    return [Compared(*row) for row in answer(db, sql, bindings)]
