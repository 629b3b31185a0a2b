"""Which rows of a step go to which rank, so that all of them are done at about the same time. Pure functions.

Guarantee: every row goes to exactly one rank; equal lengths give equal shares on every machine, because only integers are
compared. With 64 completions of log-normal length on 8 ranks the busiest rank has at most 5 % more work than the mean, or than
the longest row where that is more (95th percentile); docs/benchmarks.md has the measurement.

Work is counted in tokens, padding and the fixed cost of a pass included, as `consumer.batches.micro_batches` counts it.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from consumer.batches.micro_batches import cut_rows, least_tokens

_FINER = (1, 1.5, 2, 3, 4, 6, 8)  # micro-batches per rank that are tried
_PARTNERS = 3  # ranks with the least work, to which the busiest one tries to give a row
_EXCHANGES = 4  # that are tried with each
_NEAR = 2  # rows of a partner on either side of the best length, that are looked at for each row
_MOST_ROUNDS = 256
_WORTH_A_ROUND = 512  # of the mean work, the part by which the busiest rank is above it


def shares(lengths: Sequence[int], max_tokens: int, *, padded: bool, world: int) -> list[list[int]]:
    """The rows of each rank; some have none if there are fewer rows than ranks.

    Micro-batches of neighbours in length have little padding, and small ones can be dealt out evenly. So the step is cut more
    and more finely, each cut is dealt out longest first (Graham 1969), and so are the rows alone; of all these the best is taken.
    Then the busiest rank gives a row away, or exchanges one for a shorter one, as long as both are less busy than it was.

    Args:
        lengths: tokens of each row.
    """

    def work(rows: Sequence[int]) -> int:
        return least_tokens([lengths[row] for row in rows], max_tokens, padded=padded)

    limits = {max_tokens} | {max(1, min(max_tokens, int(sum(lengths) / (world * parts)))) for parts in _FINER}
    dealt = [_deal([[row] for row in range(len(lengths))], work, world)]
    dealt += [_deal(cut_rows(lengths, limit, padded=padded), work, world) for limit in sorted(limits)]
    best = min(dealt, key=lambda each: max(work(rows) for rows in each))
    return _evened(best, lengths, work)


def _deal(parts: list[list[int]], work: Callable[[Sequence[int]], int], world: int) -> list[list[int]]:
    """Each part, the largest first, to the rank with the least work so far."""
    result: list[list[int]] = [[] for _ in range(world)]
    ranks = [(0, rank) for rank in range(world)]
    for amount, part in sorted(((work(part), part) for part in parts), key=lambda each: (-each[0], each[1])):
        least, rank = heapq.heappop(ranks)
        result[rank] += part
        heapq.heappush(ranks, (least + amount, rank))
    return result


def _evened(ranks: list[list[int]], lengths: Sequence[int], work: Callable[[Sequence[int]], int]) -> list[list[int]]:
    amounts = [work(rows) for rows in ranks]
    for _ in range(_MOST_ROUNDS):
        order = sorted(range(len(ranks)), key=lambda rank: (amounts[rank], rank))
        busiest = order[-1]
        if (amounts[busiest] * len(ranks) - sum(amounts)) * _WORTH_A_ROUND <= sum(amounts):
            break
        for partner in order[: min(_PARTNERS, len(order) - 1)]:
            better = _exchange(ranks[busiest], ranks[partner], (amounts[busiest], amounts[partner]), lengths, work)
            if better is not None:
                ranks[busiest], ranks[partner] = better
                amounts[busiest], amounts[partner] = work(better[0]), work(better[1])
                break
        else:
            break
    return ranks


def _exchange(
    busiest: list[int],
    partner: list[int],
    amounts: tuple[int, int],
    lengths: Sequence[int],
    work: Callable[[Sequence[int]], int],
) -> tuple[list[int], list[int]] | None:
    """Both after a row, or two rows, changed places; None if no such change leaves both less busy than the first was."""
    for away, back in _changes(busiest, partner, (amounts[0] - amounts[1]) // 2, lengths):
        left = [row for row in busiest if row != away] + ([back] if back >= 0 else [])
        right = [row for row in partner if row != back] + [away]
        if work(left) < amounts[0] and work(right) < amounts[0]:
            return left, right
    return None


def _changes(busiest: list[int], partner: list[int], half: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """A few rows to give away, each with a shorter row to take for it, or -1 for none: those that move about `half` tokens."""
    theirs = [-1, *sorted(partner, key=lambda row: (lengths[row], row))]
    own, other = np.array([lengths[row] for row in busiest]), np.array([0, *(lengths[row] for row in theirs[1:])])
    near = np.searchsorted(other, own - half)[:, None] + np.arange(-_NEAR, _NEAR)
    near = near.clip(0, len(theirs) - 1)
    moved = own[:, None] - other[near]
    distance = np.where(moved > 0, np.abs(moved - half), max(lengths) + half)
    bound = np.sort(distance, axis=None)[:_EXCHANGES][-1]
    found = {
        (int(distance[place, side]), busiest[place], theirs[near[place, side]])
        for place, side in np.argwhere((distance <= bound) & (moved > 0)).tolist()
    }
    return [(away, back) for _, away, back in sorted(found)[:_EXCHANGES]]
