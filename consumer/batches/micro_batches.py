"""Which rows of a rank go through the model together. Pure functions.

Guarantee: every row is in exactly one micro-batch; none has more than `max_tokens` tokens, padding included, unless it is a
single row; equal lengths give equal micro-batches, the longest rows first, so that memory peaks at once or never. Among all ways
to cut the rows in the order of their lengths, this is the one of the fewest tokens, padding and a fixed cost of a pass included.
"""

from collections.abc import Sequence

import numpy as np

_FIXED_TOKENS = 256  # what a forward and backward pass costs beside its tokens, in tokens
_NEVER = np.iinfo(np.int64).max


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
        total = np.where(fits, cost[begins] + tokens + _FIXED_TOKENS, _NEVER)
        begin[end] = begins[total.argmin()]
        cost[end] = total.min()
    cut = []
    end = len(order)
    while end:
        cut.append(order[begin[end] : end])
        end = int(begin[end])
    return cut[::-1]
