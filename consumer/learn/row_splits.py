"""Splits of rows: to the ranks of a step, and to the micro-batches of a rank. Pure functions.

Guarantee: every row goes to exactly one micro-batch of one rank; none has more than `max_tokens` tokens, padding included, unless
it is a single row. Equal sizes give equal splits on every machine, because only integers are compared. The longest rows, or the
largest micro-batches, come first, so that memory peaks at once or never. Among all splits of a rank's rows in one order this one
has the fewest tokens, padding and a fixed cost of a pass included. The order of padded rows is that of their lengths. Rows of a
tree stay in the order in which neighbours begin alike, so rows of one prompt stay together. With 64 completions of log-normal
length on 8 ranks the busiest rank has at most 5 % more work than the mean, or than the longest row if that is more (95th
percentile). With long prompts, which a second rank would compute again, it has 15 %.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from consumer.learn.tree import shared_within

_FINER = (1, 1.5, 2, 3, 4, 6, 8)  # micro-batches per rank that are tried
_PARTNERS = 3  # ranks with the least work, to which the busiest one tries to give a row
_EXCHANGES = 4  # that are tried with each
_NEAR = 2  # rows of a partner on either side of the best length, that are looked at for each row
_MOST_ROUNDS = 256
_WORTH_A_ROUND = 512  # of the mean work, the part by which the busiest rank is above it
_FIXED_TOKENS = 256  # the cost of a forward and backward pass beside its tokens, in tokens


class Sizes(NamedTuple):
    """The tokens of rows.

    Args:
        lengths: tokens of each row, at least 1.
        shared: tokens at the beginning of each row that the row before it has too, as `consumer.learn.tree.shared_beginnings`
            finds them; None: rows take the room of the longest beside them.
    """

    lengths: Sequence[int]
    shared: Sequence[int] | None = None

    def of(self, rows: Iterable[int]) -> "Sizes":
        """Return the sizes of some rows; of those of a tree in their order."""
        if self.shared is None:
            return Sizes([self.lengths[row] for row in rows])
        chosen = sorted(rows)
        return Sizes([self.lengths[row] for row in chosen], shared_within(self.shared, chosen))

    @property
    def added(self) -> list[int]:
        """Tokens that each row brings to those before it."""
        if self.shared is None:
            return list(self.lengths)
        return [length - shared for length, shared in zip(self.lengths, self.shared, strict=True)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all in one micro-batch, padding included."""
        return len(self.lengths) * max(self.lengths) if self.shared is None else sum(self.added)


def split_rows(sizes: Sizes, max_tokens: int) -> list[list[int]]:
    """Return the indexes of the rows of each micro-batch, in the cheapest way."""
    order = list(range(len(sizes.lengths)))
    if sizes.shared is None:
        order.sort(key=lambda row: -sizes.lengths[row])
    _, begins = _cheapest(sizes.of(order), max_tokens)
    cut, end = list[list[int]](), len(order)
    while end:
        cut.append(order[begins[end] : end])
        end = begins[end]
    cut.reverse()
    return cut if sizes.shared is None else sorted(cut, key=lambda rows: -sizes.of(rows).num_tokens)


def least_tokens(sizes: Sizes, max_tokens: int) -> int:
    """Return the cost of all micro-batches of `split_rows` together, in tokens."""
    if sizes.shared is None:
        sizes = Sizes(sorted(sizes.lengths, reverse=True))
    return _cheapest(sizes, max_tokens)[0][-1]


def _cheapest(sizes: Sizes, max_tokens: int) -> tuple[list[int], list[int]]:
    """Return, for the first 0, 1, 2, ... rows, their least cost, and where the last micro-batch of the cheapest split begins.

    Args:
        sizes: of padded rows, the longest first.
    """
    return _padded(list(sizes.lengths), max_tokens) if sizes.shared is None else _of_tree(sizes, max_tokens)


def _of_tree(sizes: Sizes, max_tokens: int) -> tuple[list[int], list[int]]:
    """A micro-batch from b to e has the tokens that its rows add, and once more those that row b shares with row b - 1. The
    greater b is, the smaller it is. So a queue has every b that may still be the cheapest, and its first is it."""
    assert sizes.shared is not None
    upto, cost, begins, first = [0, *accumulate(sizes.added)], [0], [0], 0
    queue = deque[tuple[int, int]]()  # the cost of b beside all tokens up to the end, and b; ascending
    for end in range(1, len(upto)):
        begin = end - 1
        key = cost[begin] + sizes.shared[begin] - upto[begin]
        while queue and queue[-1][0] > key:
            queue.pop()
        queue.append((key, begin))
        while first < begin and sizes.shared[first] + upto[end] - upto[first] > max_tokens:
            first += 1
        while queue[0][1] < first:
            queue.popleft()
        key, begin = queue[0]
        cost.append(key + upto[end] + _FIXED_TOKENS)
        begins.append(begin)
    return cost, begins


def _padded(length: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """The cost of a micro-batch from b to e is (e - b) length[b], and it grows less with e the greater b is: once a later b is
    cheaper than an earlier one, it stays so. So a queue has the b that will be the cheapest, each with the e from which on it is
    (Galil, Park 1992, https://doi.org/10.1016/0304-3975(92)90135-3)."""
    cost, begins = [0], [0]
    queue = deque([(1, 0)])

    def takes_over(early: int, late: int) -> int:
        """Return the first end for which `late` is cheaper than `early`, or `early` would have too many tokens."""
        expiry = early + max(1, max_tokens // length[early]) + 1
        lead = cost[late] - late * length[late] - cost[early] + early * length[early]
        gain = length[early] - length[late]
        if gain:
            expiry = min(expiry, lead // gain + 1)
        elif lead < 0:
            expiry = late + 1
        return max(expiry, late + 1)

    for end in range(1, len(length) + 1):
        while len(queue) > 1 and queue[1][0] <= end:
            queue.popleft()
        begin = queue[0][1]
        cost.append(cost[begin] + (end - begin) * length[begin] + _FIXED_TOKENS)
        begins.append(begin)
        if end == len(length):
            break
        since = end + 1
        while queue:
            since = takes_over(queue[-1][1], end)
            if since > queue[-1][0]:
                break
            queue.pop()
        queue.append((since, end))
    return cost, begins


def shares(sizes: Sizes, max_tokens: int, *, world: int) -> list[list[int]]:
    """Return the rows of each rank, ascending; some have none if there are fewer rows than ranks.

    Micro-batches of neighbours have little padding, or much in common, and small ones can be dealt out evenly. So the step is
    cut more and more finely, each cut is dealt out longest first (Graham 1969), and so are the rows alone; of all these the best
    is taken. Then the busiest rank gives a row away, or exchanges one for a shorter one, as long as both are less busy than it
    was.
    """

    def work(rows: Sequence[int]) -> int:
        return least_tokens(sizes.of(rows), max_tokens)

    total = sum(sizes.added)
    limits = {max_tokens} | {max(1, min(max_tokens, int(total / (world * parts)))) for parts in _FINER}
    dealt = [_deal([[row] for row in range(len(sizes.lengths))], work, world)]
    dealt += [_deal(split_rows(sizes, limit), work, world) for limit in sorted(limits)]
    best = min(dealt, key=lambda each: max(work(rows) for rows in each))
    return [sorted(rows) for rows in _rebalance(best, _alone(sizes), work)]


def _alone(sizes: Sizes) -> list[int]:
    """Return the tokens that go with each row when it leaves its neighbours."""
    if sizes.shared is None:
        return list(sizes.lengths)
    beside = map(max, sizes.shared, [*sizes.shared[1:], 0])
    return [length - shared for length, shared in zip(sizes.lengths, beside, strict=True)]


def _deal(parts: list[list[int]], work: Callable[[Sequence[int]], int], world: int) -> list[list[int]]:
    """Deal out each part, the largest first, to the rank with the least work so far."""
    result: list[list[int]] = [[] for _ in range(world)]
    ranks = [(0, rank) for rank in range(world)]
    for amount, part in sorted(((work(part), part) for part in parts), key=lambda each: (-each[0], each[1])):
        least, rank = heapq.heappop(ranks)
        result[rank] += part
        heapq.heappush(ranks, (least + amount, rank))
    return result


def _rebalance(ranks: list[list[int]], lengths: Sequence[int], work: Callable[[Sequence[int]], int]) -> list[list[int]]:
    amounts = [work(rows) for rows in ranks]
    for _ in range(_MOST_ROUNDS):
        order = sorted(range(len(ranks)), key=lambda rank: (amounts[rank], rank))
        busiest = order[-1]
        if (amounts[busiest] * len(ranks) - sum(amounts)) * _WORTH_A_ROUND <= sum(amounts):
            break
        for partner in order[: min(_PARTNERS, len(order) - 1)]:
            better = _best_move(ranks[busiest], ranks[partner], (amounts[busiest], amounts[partner]), lengths, work)
            if better is not None:
                ranks[busiest], ranks[partner] = better
                amounts[busiest], amounts[partner] = work(better[0]), work(better[1])
                break
        else:
            break
    return ranks


def _best_move(
    busiest: list[int],
    partner: list[int],
    amounts: tuple[int, int],
    lengths: Sequence[int],
    work: Callable[[Sequence[int]], int],
) -> tuple[list[int], list[int]] | None:
    """Return both ranks' rows after moving one row or swapping two; None if no move lowers the larger load."""
    for away, back in _changes(busiest, partner, (amounts[0] - amounts[1]) // 2, lengths):
        left = [row for row in busiest if row != away] + ([back] if back >= 0 else [])
        right = [row for row in partner if row != back] + [away]
        if work(left) < amounts[0] and work(right) < amounts[0]:
            return left, right
    return None


def _changes(busiest: list[int], partner: list[int], half: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return a few rows to give away, each with a shorter row to take for it, or -1 for none, that move about `half` tokens."""
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
