"""The producer's turns on a GPU that it shares with the trainer (`pipeline.gpu: turns`).

Guarantee: in the trainer's turn the engine sleeps, and heartbeats report it as asleep only while it is. No request is lost:
running ones end, or are cut and continued; new ones wait. After waking, the engine's log-probs are compared with those before
the sleep; only then do requests enter. A trainer that is silent for `silence_s` loses its turn. The engine wakes once the GPU
has as much free memory as the engine released.

    awake --trainer's turn--> draining --engine is empty--> asleep --turn over, room--> awake
                                 |                                                        ^
                                 +--------------------- turn over ------------------------+
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from producer.engine_contract import Engine
from producer.engine_gate import EngineGate
from producer.metrics import Counters
from protocol.errors import StalledError
from protocol.gpu.memory import gib
from protocol.wire.messages import GpuTurn

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_SAY_EVERY_S = 10.0


async def until_free(num_bytes: float, free_bytes: Callable[[], int | None], limit_s: float) -> None:
    """Wait until `num_bytes` of the GPU are free or its free memory is unknown. Raises StalledError after `limit_s`."""
    began = said = time.monotonic()
    while (free := free_bytes()) is not None and free < num_bytes:
        now = time.monotonic()
        if now - began > limit_s:
            raise StalledError(
                f"the GPU has had {gib(free)} free for {limit_s:.0f} s (pipeline.stall_timeout_s), and the engine needs "
                f"{gib(num_bytes)}; end the other programs on this GPU, which nvidia-smi lists"
            )
        if now - said > _SAY_EVERY_S:
            said = now
            logger.info("waiting for %s of the GPU, which has %s free", gib(num_bytes), gib(free))
        await asyncio.sleep(_POLL_S)


@dataclass
class GpuTurns:
    """Let the engine sleep in the trainer's turns. `note` and `run` belong to the event loop.

    `unchanged` is entered around a sleep and raises if the engine computes other log-probs afterwards. `notify_link` is called
    when `counters.asleep_in` changed, so that a heartbeat is sent. `free_bytes` is the GPU's free memory, None if unknown;
    `stall_timeout_s` bounds the wait for it. `try_moving` locks the GPU against other producers that fall asleep or wake, so
    that memory freed meanwhile is this engine's; None if another producer holds the lock."""

    engine: Engine
    gate: EngineGate
    unchanged: Callable[[], AbstractAsyncContextManager[None]]
    counters: Counters
    notify_link: Callable[[], None]
    silence_s: float
    stall_timeout_s: float
    free_bytes: Callable[[], int | None]
    try_moving: Callable[[], ExitStack | None] = ExitStack
    clock: Callable[[], float] = time.monotonic
    _turn: GpuTurn | None = None
    _heard_at: float = 0.0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, turn: GpuTurn | None) -> None:
        """Note the turn, which the trainer repeats; None: it shares no GPU with this producer."""
        self._heard_at, self._turn = self.clock(), turn
        self._changed.set()

    async def run(self) -> None:
        """Run until cancelled. Raises EngineError if the engine fails."""
        while True:
            while not self._must_sleep():
                await self._changed.wait()
                self._changed.clear()
            if await self._unless_over(self.gate.close(self._turn.within_s if self._turn else 0.0)):
                await self._sleep()

    def _must_sleep(self) -> bool:
        return (
            self._turn is not None and self._turn.side == "trainer" and self.clock() - self._heard_at < self.silence_s
        )

    async def _sleep(self) -> None:
        """Sleep with the gate closed, through all of the trainer's turns until it is the producers' again."""
        began = self.clock()
        async with self.unchanged():
            await self._sleep_through()
        self.gate.open()
        self.counters.asleep_s += self.clock() - began
        logger.info("the engine is awake after %.1f s", self.clock() - began)

    async def _sleep_through(self) -> None:
        async with self._moving():
            before = self.free_bytes()
            await self.engine.sleep()
            after = self.free_bytes()
        logger.info("the engine sleeps: it is the trainer's turn on the GPU")
        while self._must_sleep():
            assert self._turn is not None
            self._set_asleep_in(self._turn.number)
            await self._next()
        self._set_asleep_in(-1)
        if self._turn is not None and self._turn.side == "trainer":
            logger.warning("the trainer has been silent for %.0f s and loses its turn on the GPU", self.silence_s)
        given_up = 0 if before is None or after is None else max(0, after - before)
        await until_free(given_up, self.free_bytes, self.stall_timeout_s)
        async with self._moving():
            await self.engine.wake()

    @asynccontextmanager
    async def _moving(self) -> AsyncIterator[None]:
        """Hold the lock of `try_moving`. Raises StalledError if another producer keeps it longer than `stall_timeout_s`."""
        began = self.clock()
        while (moving := self.try_moving()) is None:
            if self.clock() - began > self.stall_timeout_s:
                raise StalledError(
                    f"another producer on this GPU has been falling asleep or waking for {self.stall_timeout_s:g} s "
                    "(pipeline.stall_timeout_s); its log has the cause: restart it, or raise the limit"
                )
            await asyncio.sleep(_POLL_S)
        with moving:
            yield

    async def _unless_over(self, leaving: Coroutine[Any, Any, None]) -> bool:
        """Return True when the engine is empty, False if the trainer's turn ended first."""
        task = asyncio.create_task(leaving)
        try:
            while not task.done() and self._must_sleep():
                await asyncio.wait([task], timeout=_POLL_S)
        finally:
            task.cancel()
            await asyncio.wait([task])
        if task.cancelled():
            return False
        task.result()
        return True

    async def _next(self) -> None:
        """Wait for the next turn from the trainer, for at most `_POLL_S`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _POLL_S)
        self._changed.clear()

    def _set_asleep_in(self, number: int) -> None:
        if number != self.counters.asleep_in:
            self.counters.asleep_in = number
            self.notify_link()
