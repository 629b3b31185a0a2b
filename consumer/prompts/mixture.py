"""How several sources share the prompts of an epoch.

Guarantee: pure; a prompt id means the same row of the same source as long as sizes and weights stay what they are. An epoch
has every row at least once, and every source its share of it, up to a row.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


class Mixture:
    """
    Args:
        sizes: rows of each source, none of them 0.
        weights: the sources' shares, in relation to each other; None: every row once.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None) -> None:
        self._sizes = list(sizes)
        self.counts = list(sizes)
        """Prompts of each source in an epoch."""
        if weights is not None:
            per_weight = max(size / weight for size, weight in zip(sizes, weights, strict=True))
            self.counts = [max(size, round(per_weight * weight)) for size, weight in zip(sizes, weights, strict=True)]
        self._ends = list(accumulate(self.counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, prompt_id: int) -> tuple[int, int]:
        """Source and row.

        Raises:
            IndexError: there is no such prompt.
        """
        if not 0 <= prompt_id < len(self):
            raise IndexError(prompt_id)
        source = bisect_right(self._ends, prompt_id)
        return source, (prompt_id - self._ends[source] + self.counts[source]) % self._sizes[source]
