"""The places that the daemons of a campaign fill, and the count of what was done to them.

Guarantee: plain records; the campaign alone changes them.
"""

from collections import Counter
from dataclasses import dataclass, field

from campaigns.chaos.fates import NONE, Fate, FateDeck
from campaigns.chaos.fleet import Daemon, Role


class CampaignError(AssertionError):
    """A daemon did what no daemon may do."""


@dataclass
class Slot:
    """The place of one daemon, filled again whenever it is killed."""

    role: Role
    name: str
    deck: FateDeck
    daemon: Daemon | None = None
    fate: Fate = NONE
    fate_from: float = 0.0
    killed: str = ""  # how, if it was by us
    stopped_until: float = 0.0
    starts: int = 0


@dataclass
class Tally:
    """What was done to the run."""

    kills: int = 0
    stops: int = 0
    rivals: int = 0  # trainers started beside one that stood still, and refused
    by_kind: Counter[str] = field(default_factory=Counter)
    by_point: Counter[str] = field(default_factory=Counter)
    stops_by_point: Counter[str] = field(default_factory=Counter)
    restarts: list[tuple[str, str, float]] = field(default_factory=list)  # slot, evidence file, when
    producers_not_told: int = 0  # that the run was over
