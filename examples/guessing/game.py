"""The game: the other side thinks of a number, and says of each guess whether it is higher, lower or right.

Guarantee: nothing of Slipstream is needed, so that a server in a virtual environment of its own can play it.
"""

import math

LARGEST, TURNS = 15, 4  # halving what is left finds every number in time


class Game:
    """Thinks of a number from 1 to `LARGEST`."""

    def __init__(self, secret: int) -> None:
        self._secret = secret
        self._low, self._high = 1, LARGEST  # what the answers so far leave

    def answer(self, text: str) -> tuple[str, float, bool]:
        """Return what is said to a guess, its reward, and whether the game is over, as after a text that is no number. The reward
        is 1 for a guess whose answer at least halves what is left, in bits if it does not, and so 0 for one that earlier answers
        exclude."""
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= LARGEST):
            return "", 0.0, True
        guess, before = int(text), self._high - self._low + 1
        if guess == self._secret:
            return "right", 1.0, True
        if guess < self._secret:
            said, self._low = "higher", max(self._low, guess + 1)
        else:
            said, self._high = "lower", min(self._high, guess - 1)
        return said, min(1.0, math.log2(before / (self._high - self._low + 1))), False
