"""The producer's turns on a GPU that it shares with the trainer (`pipeline.gpu: turns`).

Guarantee: in the trainer's turn the engine sleeps, and the trainer is told so only after it does and only while it does. Nothing
is lost by it: what runs ends, or is cut and goes on, and whoever wants the engine waits. Nobody gets it back before it was seen
to compute what it did before. A trainer that says nothing for `silence_s` has lost its turn; the engine wakes when the GPU has
the room that it gave up, whoever uses it until then.

    awake --trainer's turn--> leaving --nobody is in the engine--> asleep --turn over, room--> awake
                                 |                                                               ^
                                 +------------------------ turn over ----------------------------+
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
    """Returns when so much memory is free, or nobody can tell. Raises StalledError after `limit_s`."""
    began = said = time.monotonic()
    while (free := free_bytes()) is not None and free < num_bytes:
        now = time.monotonic()
        if now - began > limit_s:
            raise StalledError(
                f"the GPU has had {gib(free)} free for {limit_s:.0f} s, and the engine needs {gib(num_bytes)}: look in "
                "nvidia-smi who uses it"
            )
        if now - said > _SAY_EVERY_S:
            said = now
            logger.info("waiting for %s of the GPU, which has %s free", gib(num_bytes), gib(free))
        await asyncio.sleep(_POLL_S)


@dataclass
class GpuTurns:
    """`note` and `run` belong to the event loop. `unchanged` is entered around a sleep, and raises where the engine is not what
    it was. `told` is called when the trainer is to be told of a change; `free_bytes` of the GPU are None where nobody can tell;
    `stall_timeout_s` bounds the wait for room. What `try_moving` opens is this producer's alone among those on its GPU: what
    becomes free meanwhile is its own. None: another one has it."""

    engine: Engine
    gate: EngineGate
    unchanged: Callable[[], AbstractAsyncContextManager[None]]
    counters: Counters
    told: Callable[[], None]
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
        """Until it is cancelled, or the engine fails."""
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
            self._say(self._turn.number)
            await self._next()
        self._say(-1)
        if self._turn is not None and self._turn.side == "trainer":
            logger.warning("the trainer has said nothing for %.0f s and loses its turn on the GPU", self.silence_s)
        given_up = 0 if before is None or after is None else max(0, after - before)
        await until_free(given_up, self.free_bytes, self.stall_timeout_s)
        async with self._moving():
            await self.engine.wake()

    @asynccontextmanager
    async def _moving(self) -> AsyncIterator[None]:
        """Raises StalledError if another producer comes or goes for too long."""
        began = self.clock()
        while (moving := self.try_moving()) is None:
            if self.clock() - began > self.stall_timeout_s:
                raise StalledError(
                    f"another producer has come to this GPU or left it for {self.stall_timeout_s:g} s "
                    "(pipeline.stall_timeout_s); look at its log"
                )
            await asyncio.sleep(_POLL_S)
        with moving:
            yield

    async def _unless_over(self, leaving: Coroutine[Any, Any, None]) -> bool:
        """Whether the engine was left; False if the trainer did not want its turn any more."""
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
        """Until the trainer says something else, or a moment has passed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _POLL_S)
        self._changed.clear()

    def _say(self, asleep_in: int) -> None:
        if asleep_in != self.counters.asleep_in:
            self.counters.asleep_in = asleep_in
            self.told()
