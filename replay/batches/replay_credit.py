"""How many groups a batch may replay, and how many new ones it takes at least: arithmetic, nothing else.

Guarantee: with `rate` trainings per delivered group, no more are taken; and replays never run more than one batch ahead of
the groups that are leased, which would otherwise come back too old.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ReplayCredit:
    """Every delivered group earns `rate` trainings, whether it has signal or not. Every training spends one, the first one of
    a group too. What is left over may be spent on replays. At most one batch of it is kept from cut to cut, and the rest is
    forgotten: leases count on a batch to take its groups in the order of their leases, and a long run of replays would let
    steps overtake groups that are still being generated.

    Example: batches of 4, a rate of 1, at most 3 replays in a batch. 20 groups were delivered, of which 7 have signal. The first
    batch takes 4 of these, and the second begins with the other 3:

        credit = ReplayCredit(size=4, rate=1.0, max_replayed=3)
        credit = credit.at_cut(delivered=20, trained=4)     # 16 trainings are left; 4 are kept, and 12 forgotten
        credit.allowed(0, delivered=20, trained=4)          # 0, because the batch is full
        credit = credit.at_cut(delivered=20, trained=7)     # 12 stay forgotten
        credit.allowed(1, delivered=20, trained=7)          # 1: the batch is missing 1, and 20 - 12 - 7 = 1 is left

    8 groups are trained then and nothing is left. If the next group has signal, it earns the training that it takes itself:

        credit = credit.at_cut(delivered=21, trained=9)
        credit.allowed(3, delivered=21, trained=9)          # 0 = 21 - 12 - 9
    """

    size: int  # groups in a batch
    rate: float  # trainings per delivered group
    max_replayed: int  # of the groups in a batch; less than `size`
    forgotten: float = 0.0  # delivered groups whose trainings cannot be spent any more

    @property
    def least_fresh(self) -> int:
        """Leased groups that a batch takes at least, the others being replayed. In the example: max(4 / 1, 4 - 3) = 4; with a
        rate of 2 it would be 2."""
        return min(self.size, max(math.ceil(self.size / self.rate), self.size - self.max_replayed))

    def at_cut(self, delivered: int, trained: int) -> "ReplayCredit":
        """The credit from which a batch is cut, whose new groups are among those that were `trained` so far."""
        return replace(self, forgotten=max(self.forgotten, delivered - (trained + self.size) / self.rate))

    def allowed(self, missing: int, delivered: int, trained: int) -> int:
        """How many of the groups that a batch is missing may be replayed ones."""
        left = math.floor(self.rate * (delivered - self.forgotten) - trained)
        return max(0, min(missing, self.max_replayed, left))
