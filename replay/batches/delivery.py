"""A group that arrived: as a producer delivers it, as the journal keeps it, and what the report of a step says of it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.groups import RolloutGroup
from replay.journal.tables import Outcome


class Delivery(NamedTuple):
    """A group, with the frame that goes into the journal."""

    group: RolloutGroup
    frame: bytes
    producer: str
    missing: bytes = b""  # why rewards of it are missing, encoded; empty: nothing is known
    of_this_run: bool = True  # False: the producer came from another run, so that only a lease of this process is meant


@dataclass(frozen=True, eq=False)
class Arrival:
    """What the report of a step says of a group that arrived: a few bytes for each of its n completions, however long they
    are, because many arrive while no batch is cut."""

    outcome: Outcome
    rewards: NDArray[np.float32]  # (n, F), NaN where a function gave none
    lengths: NDArray[np.int32]  # (n,), in tokens that the policy sampled
    truncated: NDArray[np.bool_]  # (n,)

    @classmethod
    def of(cls, group: RolloutGroup, outcome: Outcome = "accepted") -> "Arrival":
        return cls(outcome, group.rewards, group.sampled_lengths, group.was_truncated)
