"""Success by attempt at a prompt, beside a fair comparison. Pure functions of what a journal says of its groups.

Guarantee: fresh prompts are compared at the very versions that answered the rerolls, and in the same proportions.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

QUERY = "SELECT epoch, prompt_id, reroll, policy_version, num_scored, num_successes FROM groups ORDER BY seq"
_NEAR = 2  # versions; what a version's rate is pooled over, as a batch has only a few groups of each


@dataclass(frozen=True)
class Attempt:
    """What became of prompts at their so many-th return, summed over groups. Divide by `scored` for a rate."""

    groups: int
    scored: int
    successes: int
    solved_groups: int  # groups with at least one success
    fresh_now: float  # successes that fresh prompts would have had, at the versions of these attempts
    fresh_before: float  # the same at the versions of these prompts' first attempts, which all failed


def by_reroll(rows: Sequence[Sequence[int]]) -> dict[int, Attempt]:
    """Attempts by reroll, from rows of `QUERY`. Reroll 0 is a prompt's own turn."""
    fresh: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    first: dict[tuple[int, int], int] = {}
    for epoch, prompt_id, reroll, version, scored, successes in rows:
        if reroll == 0:
            first[epoch, prompt_id] = version
            fresh[version][0] += scored
            fresh[version][1] += successes

    def rate(version: int) -> float:
        near = [fresh[one] for one in range(version - _NEAR, version + _NEAR + 1) if one in fresh]
        scored = sum(one[0] for one in near)
        return sum(one[1] for one in near) / scored if scored else 0.0

    result = {}
    for number in sorted({row[2] for row in rows}):
        part = [row for row in rows if row[2] == number]
        result[number] = Attempt(
            groups=len(part),
            scored=sum(row[4] for row in part),
            successes=sum(row[5] for row in part),
            solved_groups=sum(row[5] > 0 for row in part),
            fresh_now=sum(row[4] * rate(row[3]) for row in part),
            fresh_before=sum(row[4] * rate(first[row[0], row[1]]) for row in part),
        )
    return result
