"""The plugin `simulated_user`: a second model answers the policy's turns as the user, over an OpenAI-compatible server.

Guarantee: the policy never sees a made-up answer. A server that is down or busy is asked again; after all tries, or at once if it
refuses the key or answers in another form, that is an outage and no fault of the prompt. A conversation that it cannot take, such
as a long one, fails the episode. The server sees the roles exchanged, behind its own prompt.
"""

import asyncio
from contextlib import suppress
from typing import Annotated, Any

import aiohttp
import msgspec

from producer.environments.contract import OutageError
from producer.rewards.pool import pause_s
from protocol.config.environment_servers import SimulatedUserOptions
from protocol.http_client import (
    UNFIT,
    HttpClient,
    ServerLostError,
    ServerMismatchError,
    ServerRefusedError,
    open_session,
)

_ROLES = {"user": "assistant", "assistant": "user"}
_PLACE = "environment.options"
_PATH = "/v1/chat/completions"


class _Said(msgspec.Struct):
    content: Annotated[str, msgspec.Meta(min_length=1)]


class _Choice(msgspec.Struct):
    message: _Said


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class SimulatedUser:
    """An environment without tools. One of the user's own may extend it with tools and a reward."""

    def __init__(self, **options: Any) -> None:
        self._options = SimulatedUserOptions.model_validate(options)
        self._session: aiohttp.ClientSession | None = None
        self._messages: list[dict[str, Any]] = []

    def reset(self, prompt: list[dict[str, Any]], **columns: Any) -> None:
        """Begin a conversation: the messages of the prompt are its first ones."""
        system = {"role": "system", "content": self._options.filled(columns)}
        told = [each | {"role": _ROLES[each["role"]]} for each in prompt if each["role"] in _ROLES]
        self._messages = [system, *told]

    async def reply(self, text: str) -> str | None:
        """Return what the user says to the policy's turn; None ends the episode, because it said the stop word."""
        self._messages.append({"role": "user", "content": text})
        said = await self._said()
        self._messages.append({"role": "assistant", "content": said})
        return None if self._options.stop and self._options.stop in said else said

    async def _said(self) -> str:
        options = self._options
        if self._session is None:  # in the loop that all calls share
            self._session = open_session(options, _PLACE)
        http = HttpClient(self._session, options.url.rstrip("/"), options.timeout_s, _PLACE)
        body = {"model": options.model, "messages": self._messages, "max_tokens": options.max_tokens}
        problem: object = "does not answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(options.timeout_s):
                for attempt in range(options.retries + 1):
                    if attempt:
                        await asyncio.sleep(pause_s(attempt))
                    try:
                        return (await http.ask(_PATH, body, _Completion)).choices[0].message.content
                    except (ServerLostError, ServerRefusedError, ServerMismatchError) as error:
                        problem = error
                        if isinstance(error, ServerMismatchError) or 300 <= getattr(error, "status", 500) < 500:
                            break
        told = f"the user at {options.url} {problem}"
        raise RuntimeError(told) if getattr(problem, "status", 0) in UNFIT else OutageError(told)
