"""Which rows of a step go through the model together, and on which rank. Pure functions.

Guarantee: every row is in exactly one micro-batch of one rank, and every rank has as many micro-batches as the others; none has
more than `max_tokens` tokens, padding included, unless it is a single row; equal lengths give equal micro-batches, the longest
rows first, so that memory peaks at once or never. Among all ways to cut the rows in the order of their lengths, this is the one
of the fewest tokens, padding and `_FIXED_TOKENS` per micro-batch included; several ranks may cut some of them once more.
"""

from collections.abc import Sequence

import numpy as np

_FIXED_TOKENS = 256  # what a forward and backward pass costs beside its tokens, in tokens


def micro_batches(
    lengths: Sequence[int], max_tokens: int, *, padded: bool, rank: int = 0, world: int = 1
) -> list[list[int]]:
    """Indexes of the rows of each micro-batch of this rank. One that is empty is there for the number alone.

    Args:
        lengths: tokens of each row, at least 1.
        padded: whether rows take the room of the longest beside them. If not, they stand one behind the other.
        world: number of ranks, which all have the same rows.
    """
    found = cut_rows(lengths, max_tokens, padded=padded)
    while len(found) % world:
        number = max(range(len(found)), key=lambda each: (len(found[each]), -each))
        rows = found[number]
        if len(rows) > 1:
            found[number : number + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        else:
            found.append([])
    return found[rank::world]


def cut_rows(lengths: Sequence[int], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Indexes of the rows of each micro-batch of one rank, in the cheapest way; arguments as of `micro_batches`."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    length = np.array([lengths[row] for row in order], np.int64)
    upto = np.concatenate([[0], length.cumsum()])
    cost = np.zeros(len(order) + 1, np.int64)  # of the rows before this one
    begin = np.zeros(len(order) + 1, np.int64)  # of the micro-batch that ends before this one
    first = 0  # where the micro-batch that ends here may begin
    for end in range(1, len(order) + 1):
        begins = np.arange(first, end)
        tokens = (end - begins) * length[first:end] if padded else upto[end] - upto[first:end]
        fits = (tokens <= max_tokens) | (begins == end - 1)
        first += int(fits.argmax())  # fewer rows, and shorter ones, take less room
        total = np.where(fits, cost[begins] + tokens + _FIXED_TOKENS, np.iinfo(np.int64).max)
        begin[end] = begins[total.argmin()]
        cost[end] = total.min()
    cut = []
    end = len(order)
    while end:
        cut.append(order[begin[end] : end])
        end = int(begin[end])
    return cut[::-1]
