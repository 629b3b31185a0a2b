"""Child processes without processes, for what must hold at every await of those who use them.

Like real ones they answer after some turns of the loop, hang, or end by themselves.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from protocol.runtime.child import ChildEndedError

Temper = Literal["answers", "hangs", "ends"]
_TURNS = 3


class FakeChildren:
    """Takes the place of `ChildProcess`.

    Args:
        answer: what they say to a message, or to the kind of message that is waited for.

    `temper`: of those that are asked from now on; `when_starting`: of those that are waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], Any]) -> None:
        self.temper: Temper = "answers"
        self.when_starting: Temper = "answers"
        self.answer = answer
        self.started: list[FakeChild] = []
        monkeypatch.setattr("protocol.runtime.child.ChildProcess", self._start)

    def _start(self, *_arguments: Any, **_settings: Any) -> "FakeChild":
        self.started.append(FakeChild(self))
        return self.started[-1]

    @property
    def num_running(self) -> int:
        return sum(child.ending is None for child in self.started)


class FakeChild:
    def __init__(self, owner: FakeChildren) -> None:
        self.ending: asyncio.Task[int] | None = None
        self.process = self.output = self
        self._owner = owner
        self._broken: Temper | None = None  # one that did not answer, or was not heard, never answers again

    def begin(self, _source: str) -> None: ...

    def resident_bytes(self) -> int:
        return 0

    async def ask(self, message: Any, _kind: Any) -> Any:
        return await self._say(message, self._owner.temper)

    async def receive(self, kind: Any) -> Any:
        return await self._say(kind, self._owner.when_starting)

    async def _say(self, message: Any, temper: Temper) -> Any:
        temper, self._broken = self._broken or temper, "hangs"
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if temper == "hangs":
            await asyncio.Event().wait()
        if temper == "ends":
            raise ChildEndedError("its process ended")
        self._broken = None
        return self._owner.answer(message)

    def terminate(self) -> "asyncio.Task[int]":
        """It takes its time to die."""
        self.ending = self.ending or asyncio.ensure_future(asyncio.sleep(0.001, -9))
        return self.ending
