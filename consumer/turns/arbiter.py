"""Whose turn it is on a shared GPU, as a state machine without threads, clocks and messages.

Guarantee: it is never the trainer's turn on the GPU before every producer that shares it has said that its engine sleeps in that
very turn, or has left. What a producer said of another turn counts for nothing, because it may have been awake in between. Every
wait for a producer ends: who is awake `2 * handover_s` after it was asked is overdue.

    producers --ask--> changing --enter, when all are asleep--> trainer
        ^                 |                                       |
        +---- hand over --+------------- hand over ---------------+
"""

from dataclasses import dataclass, field
from typing import Literal

from protocol.wire.messages import GpuTurn

Phase = Literal["producers", "changing", "trainer"]
PHASES: tuple[Phase, ...] = ("producers", "changing", "trainer")

_AWAKE = -1


@dataclass
class TurnArbiter:
    """Begins with the producers, who load their engines first. `now` is in seconds of the caller's clock.

    Args:
        number: of the first turn. No other trainer process should come to it, because producers may have slept in one of its.

    Attributes:
        number: of the turn that was announced last.
        since: when the phase began.
    """

    handover_s: float
    since: float
    phase: Phase = "producers"
    number: int = 0
    _asleep_in: dict[str, int] = field(default_factory=dict)  # producers that share the GPU: a turn, or `_AWAKE`
    _joined_at: dict[str, float] = field(default_factory=dict)
    _spent_s: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def turn(self) -> GpuTurn:
        """As producers are told."""
        return GpuTurn(self.number, "producers" if self.phase == "producers" else "trainer", self.handover_s)

    # What producers do.

    def join(self, producer: str, now: float) -> None:
        """One that counts as awake until it says something else."""
        self._asleep_in[producer], self._joined_at[producer] = _AWAKE, now

    def leave(self, producer: str) -> None:
        self._asleep_in.pop(producer, None)
        self._joined_at.pop(producer, None)

    def report(self, producer: str, asleep_in: int) -> None:
        if producer in self._asleep_in:
            self._asleep_in[producer] = asleep_in

    # What the trainer does.

    def ask(self, now: float) -> None:
        """The trainer wants the GPU, and producers are to leave it."""
        if self.phase == "producers":
            self._change("changing", now)
            self.number += 1

    def enter(self, now: float) -> bool:
        """Whether the trainer may use the GPU, from now on."""
        if self.phase == "changing" and not self.awake():
            self._change("trainer", now)
        return self.phase == "trainer"

    def hand_over(self, now: float) -> bool:
        """The trainer has left the GPU, or does not want it any more. False if it is the producers' already."""
        if self.phase == "producers":
            return False
        self._change("producers", now)
        self.number += 1
        return True

    # What can be asked.

    def awake(self) -> list[str]:
        """The producers that are not known to sleep in the turn of now."""
        return [producer for producer, turn in self._asleep_in.items() if turn != self.number]

    def overdue(self, now: float) -> list[str]:
        """The producers that should have left the GPU by now."""
        asked_before = now - 2 * self.handover_s
        if self.phase != "changing":
            return []
        return [each for each in self.awake() if max(self.since, self._joined_at[each]) <= asked_before]

    def spent_s(self, now: float) -> dict[Phase, float]:
        """Seconds of each phase so far."""
        return self._spent_s | {self.phase: self._spent_s[self.phase] + now - self.since}

    def _change(self, phase: Phase, now: float) -> None:
        self._spent_s = self.spent_s(now)
        self.phase, self.since = phase, now
