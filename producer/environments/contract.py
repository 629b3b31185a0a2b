"""The environments that episodes are played with, whoever runs them.

Guarantee: an episode has a session of its own, which ends with it; the methods of one return what was asked for, or raise
EnvironmentFailedError, which costs the episode and nothing else.
"""

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class EnvironmentFailedError(Exception):
    """The environment failed an episode. The text has the reason; the process may have ended. With `is_outage` a server that it
    needs is down or busy, and its row has no part in that."""

    def __init__(self, reason: str, *, is_outage: bool = False) -> None:
        super().__init__(reason)
        self.is_outage = is_outage


class OutageError(Exception):
    """A server that an environment needs is down or busy. Code of an environment raises it, also from a tool."""


class Session(Protocol):
    """An environment for one episode. `done` tells that it has ended it."""

    done: bool

    async def reset(self, columns: dict[str, Any], prompt_id: int, /) -> str | list[Any] | None:
        """Begin an episode on a row of the dataset, and return the text that the environment adds to its prompt."""

    async def call(self, tool: str, arguments: dict[str, Any], /) -> tuple[str | list[Any], bool]:
        """Return the content of the tool's message, and whether the tool failed."""

    async def reply(self, text: str, /) -> list[dict[str, Any]]:
        """Return the messages that answer a turn without calls; the episode is over if there are none."""

    async def turn_reward(self) -> float | None:
        """Return the environment's own reward of the last turn."""

    async def reward(self) -> float | None:
        """Return the environment's own reward of the episode."""


class Environments(Protocol):
    """The environments of a section. After the start `tools` has the JSON schemas of the tools, `rewards_turns` tells whether
    turns have rewards of their own, and `replies` whether turns without calls are answered."""

    tools: list[dict[str, Any]]
    rewards_turns: bool
    replies: bool

    async def start(self) -> None:
        """Raise ConfigError if there is no such environment, or it does not fit the configuration."""

    async def close(self) -> None: ...

    def problem(self) -> str | None:
        """Return why no episode can be played now, as far as the last ones tell."""

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Wait for a slot and hold an environment for the duration of the context. Raise EnvironmentFailedError if there is
        none."""
