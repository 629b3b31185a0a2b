"""A line of tasks that wait to be given something.

Guarantee: who has waited longest stands first. Who is cancelled is not in the line any more, from that moment on and for good;
what it was given just before goes back, once.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Wish = TypeVar("Wish")
Given = TypeVar("Given")


class WaitingLine(Generic[Wish, Given]):
    """Each waits with a wish, by which the giver chooses."""

    def __init__(self) -> None:
        self._turns: dict[asyncio.Future[Given], Wish] = {}  # in order

    @property
    def wishes(self) -> list[Wish]:
        return [wish for turn, wish in self._turns.items() if not turn.done()]

    async def wait(self, wish: Wish, take_back: Callable[[Given], None]) -> Given:
        """Returns what is given. `take_back` gets what was given to a task that has been cancelled before it knew."""
        turn: asyncio.Future[Given] = asyncio.get_running_loop().create_future()
        self._turns[turn] = wish
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                take_back(turn.result())
            raise
        finally:
            del self._turns[turn]

    def give(self, given: Given, place: int = 0) -> None:
        """To the one whose wish stands at this place of `wishes`."""
        waiting = [turn for turn in self._turns if not turn.done()]
        waiting[place].set_result(given)

    def refuse(self, error: Exception) -> None:
        for turn in self._turns:
            if not turn.done():
                turn.set_exception(error)
