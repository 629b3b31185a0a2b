"""The trainer's turns on a GPU that it shares with producers: asked for, taken and handed over.

Guarantee: the trainer's turn on the GPU begins only after every producer that shares it has reported that its engine sleeps
in that very turn, or has left. A report about another turn does not count, because the engine may have been awake in
between. Every wait for a producer ends: one that is awake `2 * handover_s` after it was asked is overdue.

`take` returns with weights and optimizer on the GPU, or raises; then, and after `hand_over`, they are in host memory and the turn
is the producers'. A producer that does not leave, or memory that no process frees, ends the trainer with a `DeviceError` that
names the culprit: going on could take the memory of both.

    producers --ask--> changing --enter, when all are asleep--> trainer
        ^                 |                                       |
        +---- hand over --+------------- hand over ---------------+
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from consumer.waiting import Limit, WaitPolicy
from protocol.errors import DeviceError
from protocol.gpu import nvml as occupancy
from protocol.gpu.memory import gib
from protocol.wire.messages import GpuTurn, Hello

logger = logging.getLogger(__name__)

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
        """The turn that producers hear of."""
        return GpuTurn(self.number, "producers" if self.phase == "producers" else "trainer", self.handover_s)

    # What producers do.

    def join(self, producer: str, now: float) -> None:
        """Add a producer, which counts as awake until it reports otherwise."""
        self._asleep_in[producer], self._joined_at[producer] = _AWAKE, now

    def leave(self, producer: str) -> None:
        self._asleep_in.pop(producer, None)
        self._joined_at.pop(producer, None)

    def report(self, producer: str, asleep_in: int) -> None:
        if producer in self._asleep_in:
            self._asleep_in[producer] = asleep_in

    # What the trainer does.

    def ask(self, now: float) -> None:
        """Ask producers to leave the GPU."""
        if self.phase == "producers":
            self._change("changing", now)
            self.number += 1

    def enter(self, now: float) -> bool:
        """Return whether the trainer may use the GPU, from now on."""
        if self.phase == "changing" and not self.awake():
            self._change("trainer", now)
        return self.phase == "trainer"

    def hand_over(self, now: float) -> bool:
        """Give the GPU to the producers. False if it is theirs already."""
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


_POLL_S = 0.1
_NUMBER_BITS = 48  # of the number of the first turn


class Moves(Protocol):
    """Moves of the trainer's tensors to the GPU and back, as `consumer.link.device_moves.DeviceMoves`, which needs torch."""

    @property
    def num_bytes(self) -> int: ...

    def free_bytes(self) -> float: ...

    def back(self) -> None: ...

    def out(self) -> None: ...


@dataclass(eq=False)
class GpuTurns:
    """`take` and `hand_over` belong to the main thread, the rest to any.

    Args:
        gpus: of the trainer, by their indexes.
        handover_s: `pipeline.gpu_handover_s`.
        settle_s: after `carry` in which producers of the process before may come back, who are awake until they say otherwise.
        stay: is entered while the trainer is on the GPU, where no producer loads its engine meanwhile. It calls what it is
            given while it waits for that.
    """

    gpus: Sequence[int]
    handover_s: float
    settle_s: float = 0.0
    stay: Callable[[Callable[[], object]], AbstractContextManager[None]] = lambda check: nullcontext()
    clock: Callable[[], float] = time.monotonic
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _moves: Moves | None = None
    _flush: Callable[[], None] = lambda: None
    _tell: Callable[[], None] = lambda: None
    _settled_at: float = 0.0
    _stay: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.ids = frozenset(occupancy.gpu_ids(self.gpus))
        self._arbiter = TurnArbiter(self.handover_s, self.clock(), number=secrets.randbits(_NUMBER_BITS))

    # What producers do, as the intake hears it.

    @property
    def turn(self) -> GpuTurn:
        with self._changed:
            return self._arbiter.turn

    def shares(self, hello: Hello) -> bool:
        """Return whether this producer uses a GPU of the trainer."""
        return not self.ids.isdisjoint(hello.gpus)

    def join(self, producer: str) -> None:
        with self._changed:
            self._arbiter.join(producer, self.clock())
            if self._arbiter.phase == "trainer":
                logger.warning(
                    "producer %s joined in the trainer's turn on the GPU; its engine is asked to sleep", producer
                )

    def leave(self, producer: str) -> None:
        with self._changed:
            self._arbiter.leave(producer)
            self._changed.notify_all()

    def report(self, producer: str, asleep_in: int) -> None:
        with self._changed:
            self._arbiter.report(producer, asleep_in)
            self._changed.notify_all()

    # What the trainer does.

    def carry(self, moves: Moves, flush: Callable[[], None], tell: Callable[[], None]) -> None:
        """Allow turns from now on.

        Args:
            moves: what the trainer has on the GPU.
            flush: returns when nothing is under way that needs it there.
            tell: announces the turn to producers.
        """
        self._moves, self._flush, self._tell = moves, flush, tell
        self._settled_at = self.clock() + self.settle_s

    @property
    def is_ours(self) -> bool:
        with self._changed:
            return self._arbiter.phase == "trainer"

    def take(self, waits: WaitPolicy) -> None:
        """Raise DeviceError if the GPU does not become free, and what `waits.check` raises."""
        if self.is_ours:
            return
        assert self._moves is not None
        words, limit = "they may be on the GPU", Limit(4 * self.handover_s, "4 x pipeline.gpu_handover_s")
        waits.wait_until(self._is_settled, "producers to come back", lambda: words, pause_s=_POLL_S)
        try:
            self._stay.enter_context(self.stay(waits.check))
            began = self.clock()
            with self._changed:
                self._arbiter.ask(began)
            self._tell()
            waits.wait_until(self._enter, "the GPU", self._describe, limit=limit)
            left = self.clock()
            has_room = partial(self._has_room, left)
            waits.wait_until(has_room, "room on the GPU", self._describe_users, limit=limit)
            self._moves.back()
        except BaseException:
            self._end_turn()
            raise
        took = self.clock() - left
        text = "the GPU is with the trainer: producers left it within %.1f s, its model came in %.1f s"
        logger.info(text, left - began, took)

    def hand_over(self) -> None:
        """Hand the GPU over to the producers. In their turn this does nothing."""
        if not self.is_ours:
            return
        assert self._moves is not None
        try:
            self._flush()
        finally:
            self._moves.out()
            had_s = self.phase()[1]
            self._end_turn()
            logger.info("the GPU is with the producers: the trainer had it for %.1f s", had_s)

    def _end_turn(self) -> None:
        self._stay.close()
        with self._changed:
            self._arbiter.hand_over(self.clock())
        self._tell()

    # What can be asked.

    def spent_s(self) -> dict[Phase, float]:
        """Seconds by whose turn it was."""
        with self._changed:
            return self._arbiter.spent_s(self.clock())

    def phase(self) -> tuple[Phase, float]:
        """Whose turn it is, and for how many seconds."""
        with self._changed:
            return self._arbiter.phase, self.clock() - self._arbiter.since

    def _is_settled(self) -> bool | None:
        return self.clock() >= self._settled_at or None

    def _enter(self) -> bool | None:
        with self._changed:
            if not self._arbiter.enter(self.clock()):
                self._changed.wait(_POLL_S)
            now = self.clock()
            if late := self._arbiter.overdue(now):
                raise DeviceError(
                    f"{_and(late)} did not leave the GPU within {now - self._arbiter.since:.0f} s of being asked to "
                    f"(twice pipeline.gpu_handover_s={self.handover_s:g}): look at its log, end it if it hangs, and go on with "
                    "--resume"
                )
            return self._arbiter.enter(now) or None

    def _has_room(self, since: float) -> bool | None:
        assert self._moves is not None
        needed, free = self._moves.num_bytes, self._moves.free_bytes()
        if free >= needed:
            return True
        waited = self.clock() - since
        if waited >= self.handover_s:
            raise DeviceError(
                f"the trainer's model needs {gib(needed)} of the GPU, and {gib(free)} are free although "
                f"it has been the trainer's turn for {waited:.0f} s (pipeline.gpu_handover_s); {self._describe_users()}. End the "
                "processes that should not be there, and go on with --resume"
            )
        time.sleep(_POLL_S)
        return None

    def _describe(self) -> str:
        with self._changed:
            return f"{_and(self._arbiter.awake())} still use it"

    def _describe_users(self) -> str:
        found = [f"process {pid} {gib(size)}" for pid, size in occupancy.users(self.gpus).items()]
        return f"in use by {_and(found)}" if found else "the driver does not say by whom the rest is used"


def _and(names: Iterable[str]) -> str:
    return ", ".join(names) or "nobody"
