"""Which rows of a rank go through the model together. Pure functions.

Guarantee: every row is in exactly one micro-batch; none has more than `max_tokens` tokens, padding included, unless it is a
single row; equal lengths give equal micro-batches, the longest rows first, so that memory peaks at once or never. Among all ways
to cut the rows in the order of their lengths, this is the one of the fewest tokens, padding and a fixed cost of a pass included.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

_FIXED_TOKENS = 256  # what a forward and backward pass costs beside its tokens, in tokens


def tokens_of(lengths: Sequence[int], padded: bool) -> int:
    """What a micro-batch of rows of these lengths costs, in tokens."""
    return _FIXED_TOKENS + (len(lengths) * max(lengths) if padded else sum(lengths))


def cut_rows(lengths: Sequence[int], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Indexes of the rows of each micro-batch, in the cheapest way.

    Args:
        lengths: tokens of each row, at least 1.
        padded: whether rows take the room of the longest beside them. If not, they stand one behind the other.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    _, begins = _cheapest([lengths[row] for row in order], max_tokens, padded)
    cut = []
    end = len(order)
    while end:
        cut.append(order[begins[end] : end])
        end = begins[end]
    return cut[::-1]


def least_tokens(lengths: Sequence[int], max_tokens: int, *, padded: bool) -> int:
    """What the micro-batches of `cut_rows` cost together, in tokens."""
    return _cheapest(sorted(lengths, reverse=True), max_tokens, padded)[0][-1]


def _cheapest(length: list[int], max_tokens: int, padded: bool) -> tuple[list[int], list[int]]:
    """Of the first 0, 1, 2, ... rows: their least cost, and where the last micro-batch of the cheapest cut begins.

    Args:
        length: descending.
    """
    return _padded(length, max_tokens) if padded else _packed(length, max_tokens)


def _packed(length: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """Rows cost the same wherever they are, so the fewest micro-batches are the cheapest: each takes what it can."""
    upto, cost, begins, first = [0, *accumulate(length)], [0], [0], 0
    for end in range(1, len(length) + 1):
        while first < end - 1 and upto[end] - upto[first] > max_tokens:
            first += 1
        cost.append(cost[first] + upto[end] - upto[first] + _FIXED_TOKENS)
        begins.append(first)
    return cost, begins


def _padded(length: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """The cost of a micro-batch from b to e is (e - b) length[b], and it grows less with e the greater b is: once a later b is
    cheaper than an earlier one, it stays so. So a queue has the b that will be the cheapest, each with the e from which on it is
    (Galil, Park 1992, https://doi.org/10.1016/0304-3975(92)90135-3)."""
    cost, begins = [0], [0]
    queue = deque([(1, 0)])

    def takes_over(early: int, late: int) -> int:
        """The first end for which `late` is cheaper than `early`, or `early` would have too many tokens."""
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
