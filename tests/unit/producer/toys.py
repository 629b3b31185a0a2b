"""Environments of the tests, by TRL's conventions."""

import asyncio
import os
import time

from producer.environments.contract import OutageError


class Shop:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.episodes = 0

    def reset(self, prompt: list[dict[str, str]], stock: int = 0, **_: object) -> str:
        if stock < 0:
            raise ValueError("no such stock")
        self.episodes += 1
        self.sold = 0
        self.stock = stock
        return f" stock {stock}"

    def buy(self, count: int) -> str:
        """
        Buys.

        Args:
            count: How many.
        """
        if count > self.stock:
            raise ValueError(f"only {self.stock} left")
        print("to standard error")
        self.sold += count
        return f"sold {count}"

    async def wait(self, seconds: float) -> str:
        """
        Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    def hang(self) -> str:
        """Never returns."""
        time.sleep(60)
        return ""

    def die(self) -> str:
        """Ends the process."""
        os._exit(3)

    def _hidden(self) -> str:
        return "secret"

    def get_reward(self) -> float | None:
        return self.sold / self.stock if self.stock else None


class Silent:
    """Without tools and without a reward."""

    def reset(self, **_: object) -> None:
        pass


class Encouraging(Silent):
    """Rewards turns."""

    def __init__(self) -> None:
        self.rewards = iter([0.5, None, float("nan")])

    def get_turn_reward(self) -> float | None:
        return next(self.rewards)


class Remote(Silent):
    """Has a server that is down, or a tool that is broken."""

    def ask(self, what: str) -> str:
        """
        Asks.

        Args:
            what: What.
        """
        raise OutageError("it is down") if what == "down" else ValueError(what)


class Teller:
    """Says higher or lower, and ends the episode itself."""

    def reset(self, secret: int, **_: object) -> None:
        self.secret, self.done = secret, False

    def reply(self, text: str) -> object:
        if text == "odd":
            return 7
        if text == "pass":
            return None
        self.done = int(text) == self.secret
        said = "higher" if int(text) < self.secret else "lower"
        return said if text != "0" else [{"role": "system", "content": "not 0"}, {"role": "user", "content": said}]

    def give_up(self) -> str:
        """Ends the episode."""
        self.done = True
        return str(self.secret)


class NoReset:
    pass


class Undocumented:
    def reset(self, **_: object) -> None:
        pass

    def tool(self, a):
        return a


def broken():
    raise RuntimeError("cannot connect")
