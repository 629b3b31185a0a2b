"""Questions to the index about prompts: the attempts at one, and what two ranges of versions made of the same ones.

Guarantee: an answer has at most `MOST` rows.
"""

from heapq import nsmallest
from typing import NamedTuple

import apsw

from slipstream.view.index.cache import answer
from slipstream.view.index.rows import UNSCORED

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
    """Of the prompts that these versions answered."""
    sql = (
        "SELECT prompt, avg(reward), max(seq) FROM groups WHERE version BETWEEN ? AND ? AND reward > ? GROUP BY prompt"
    )
    return {prompt: (mean, newest) for prompt, mean, newest in answer(db, sql, (*versions, UNSCORED))}


def compare(before: Means, after: Means, *, gained: bool) -> list[Compared]:
    """The prompts that both answered, those that changed most in this direction first."""
    both = (
        Compared(prompt, old, after[prompt][0], seq, after[prompt][1])
        for prompt, (old, seq) in before.items()
        if prompt in after
    )
    changed = [one for one in both if (one.after > one.before if gained else one.after < one.before)]
    return nsmallest(MOST, changed, key=lambda one: (-abs(one.after - one.before), one.prompt))
