"""The rule by which batches are cut, counted in answers: groups that came in time, with signal or without.

Guarantee: the batches follow from the order of the answers alone, not from when the trainer asks. No batch has more groups than
`size`, and each covers at least `size` answers, so that the q-th answer from now is in batch ceil(q / `size`) or an earlier one:
the staleness budget relies on it. With `most_answers` no batch waits for ever for more signal than one group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchRule:
    """The moment at which a batch is cut. Answers are numbered from 1 behind the batch before; `signals` are the numbers of those
    with signal, in order.

    A batch is cut after the first answer, from the `size`-th on, with which `least_signal` answers have signal; or after
    `most_answers` with one that has.
    """

    size: int
    least_signal: int
    most_answers: float = math.inf

    @classmethod
    def full(cls, size: int) -> "BatchRule":
        """Return the rule of batches that wait for `size` groups with signal, whatever that takes."""
        return cls(size, size)

    @classmethod
    def sampled(cls, size: int) -> "BatchRule":
        """Return the rule of batches that are cut after `size` answers, if a quarter of them (two at least) has signal."""
        return cls(size, min(size, max(2, math.ceil(size / 4))), 2 * size)

    @property
    def waits_for_all(self) -> bool:
        """Return whether every batch has `size` groups."""
        return math.isinf(self.most_answers)

    def last_answer(self, signals: Sequence[int], num_answers: int) -> int | None:
        """Return the number of the last answer that the next batch covers; None if it is not due after `num_answers`."""
        if not signals:
            return None
        last = max(self.most_answers, signals[0])
        if len(signals) >= self.least_signal:
            last = min(last, max(self.size, signals[self.least_signal - 1]))
        return int(last) if last <= num_answers else None

    def num_taken(self, signals: Sequence[int], num_answers: int) -> int:
        """Return how many places of the coming batches, of `size` each, are taken by the answers so far. Those of the first batch
        that is not due are taken but for the answers that it will certainly cover, at least one."""
        taken = 0
        while (last := self.last_answer(signals, num_answers)) is not None:
            taken += self.size
            signals, num_answers = [number - last for number in signals if number > last], num_answers - last
        to_go = min(self.least_signal - len(signals), self.most_answers - num_answers)
        return taken + self.size - int(max(self.size - num_answers, to_go, 1))
