"""Which rows of a rank go through the model together. Pure functions.

Guarantee: every row is in exactly one micro-batch; none has more than `max_tokens` tokens, padding included, unless it is a
single row; equal lengths give equal micro-batches, the longest rows first, so that memory peaks at once or never. Among all ways
to cut the rows in the order of their lengths, this is the one of the fewest tokens, padding and a fixed cost of a pass included.
"""

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
    length = [lengths[row] for row in order]
    upto = [0, *accumulate(length)]

    def tokens(begin: int, end: int) -> int:
        return (end - begin) * length[begin] if padded else upto[end] - upto[begin]

    cost = [0]  # of so many rows, the longest ones
    begins = [0]  # of the micro-batch that ends with them
    first = 0  # where it may begin
    for end in range(1, len(order) + 1):
        while first < end - 1 and tokens(first, end) > max_tokens:  # fewer rows, and shorter ones, take less room
            first += 1
        if padded:
            costs = [cost[begin] + (end - begin) * length[begin] for begin in range(first, end)]
        else:
            costs = [cost[begin] + upto[end] - upto[begin] for begin in range(first, end)]
        least = min(costs)
        cost.append(least + _FIXED_TOKENS)
        begins.append(first + costs.index(least))
    cut = []
    end = len(order)
    while end:
        cut.append(order[begins[end] : end])
        end = begins[end]
    return cut[::-1]
