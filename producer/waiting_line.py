"""A line of tasks that wait for their turn.

Guarantee: who has waited longest stands first. Who is cancelled is not in the line any more, from that moment on and for good;
a turn that it was given just before goes back, once.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Wish = TypeVar("Wish")


class WaitingLine(Generic[Wish]):
    """Each waits with a wish, by which the giver decides."""

    def __init__(self) -> None:
        self._turns: dict[asyncio.Future[None], Wish] = {}  # in order

    @property
    def wishes(self) -> list[Wish]:
        """Of those who wait, in order."""
        return [wish for turn, wish in self._turns.items() if not turn.done()]

    async def wait(self, wish: Wish, take_back: Callable[[], None]) -> None:
        """Waits for a turn. `take_back` is called if the task was given one and has been cancelled before it knew."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[turn] = wish
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                take_back()
            raise
        finally:
            del self._turns[turn]

    def give(self) -> None:
        """To the first one."""
        next(turn for turn in self._turns if not turn.done()).set_result(None)
