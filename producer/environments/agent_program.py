"""The producer's side of the agent program, which plays the environment of another library (`producer.environments.program`).

Guarantee: before the engine is loaded, the program has loaded its environment, or the producer ends and says why. Afterwards
there is one such program: when it ends, its tasks fail at once and another is started, after a pause that grows while programs
keep ending. It ends with the daemon.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from protocol.config.functions import plugin_place
from protocol.config.rewards import ENVIRONMENT_PLUGINS, EnvironmentSection
from protocol.errors import ConfigError
from protocol.gpu.nvml import environment_of
from protocol.runtime.child import KeptProcess
from protocol.runtime.processes import exit_text

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 900.0  # a download of a dataset included
_EXIT_GRACE_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_LINE_BYTES = 64 * 2**20  # a row of a dataset
_MAX_ERROR_BYTES = 200  # of a line that is no message
_ROOT = Path(__file__).resolve().parents[2]
# `python -c` looks in the run's folder first. Our modules come from our own, because files of the user's may have their names.
_RUN = "import sys; sys.path[0] = sys.argv[1]; from producer.environments import program; program.main(*sys.argv[2:])"


class _Program:
    """A process of the program, and the lines of JSON that it and the producer send each other. Raises ConfigError if
    it cannot be started."""

    def __init__(self, section: EnvironmentSection) -> None:
        options = section.options | section.agent_options.model_dump()
        self._settings = section.model_dump(include={"episode_timeout_s", "max_concurrent"}) | options
        self._place = f"environment.agent: {section.agent}"
        python = options.get("python") or sys.executable
        folder, plugin = plugin_place(ENVIRONMENT_PLUGINS, str(section.agent), "environment.agent")
        command = [_found(python), "-c", _RUN, str(_ROOT), folder, plugin]
        environment = os.environ | environment_of(section.gpu)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = KeptProcess(
                    command, _EXIT_GRACE_S, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment
                )
            except OSError as error:
                ours.close()
                raise ConfigError(f"{self._place}: the agent program cannot be started: {error}") from error
        self._streams = asyncio.ensure_future(asyncio.open_connection(sock=ours, limit=_MAX_LINE_BYTES))

    @classmethod
    async def start(cls, section: EnvironmentSection, work: dict[str, Any]) -> "_Program":
        """Starts a program that plays or sends rows, and waits until it has loaded its environment. Raises ConfigError
        if the program cannot load it."""
        program = cls(section)
        try:
            await program.send(program._settings | work)
            async with asyncio.timeout(_START_TIMEOUT_S):
                await program.receive()
        except BaseException as error:
            await program.terminate()
            if not isinstance(error, TimeoutError):
                raise
            why = f"the environment was not loaded within {_START_TIMEOUT_S:g} s"
            raise ConfigError(f"{program._place}: {why}") from None
        return program

    async def send(self, message: dict[str, Any]) -> None:
        _, writer = await asyncio.shield(self._streams)
        with contextlib.suppress(ConnectionError):  # it has ended, which `receive` and `ended` notice
            writer.write(json.dumps(message).encode() + b"\n")
            await writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Its next message. Raises ConfigError if the program reports a problem, sends something else, or has ended."""
        reader, _ = await asyncio.shield(self._streams)
        try:
            line = await reader.readline()
        except (ConnectionError, ValueError):
            line = b""
        if not line.endswith(b"\n"):
            how = await self.terminate()
            raise ConfigError(f"{self._place}: the agent program ended ({how}); its last output is above")
        message: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line)
        if not isinstance(message, dict):
            raise ConfigError(
                f"{self._place}: the agent program sent {line[:_MAX_ERROR_BYTES]!r}, expected a JSON object: "
                "whatever the environment prints belongs on standard error"
            )
        if "problem" in message:
            raise ConfigError(str(message["problem"]))
        return message

    async def ended(self) -> str:
        """Waits until it has ended and returns how."""
        reader, _ = await asyncio.shield(self._streams)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        return await self.terminate()

    async def terminate(self) -> str:
        """Ends it, with SIGTERM first, and whatever it started; returns how it ended. Goes on by itself when it is cancelled."""
        ending = self._process.terminate()
        ending.add_done_callback(lambda _: self._streams.result()[1].close())  # at whose end it would kill itself
        status = await asyncio.shield(ending)
        return "it does not end" if status is None else exit_text(status)


class AgentProgram:
    """See the module's guarantee. The program plays at the endpoint `base_url` with `key`, if there is one. When it has ended,
    `agent_gone` is called with the reason."""

    def __init__(
        self, section: EnvironmentSection, base_url: str, key: str, agent_gone: Callable[[str], None] = lambda _: None
    ) -> None:
        self._section = section
        self._where = {"base_url": base_url, "key": key}
        self._agent_gone = agent_gone
        self._program: _Program | None = None
        self._closed = False
        self.restarts = 0
        self.problem: str | None = None

    async def start(self) -> None:
        """Starts the program and waits until it has loaded its environment. Raises ConfigError if the program cannot
        load it."""
        self._program = await _Program.start(self._section, {"kind": "play"})

    async def run(self) -> None:
        """Lets the program play, and starts another when it has ended, until this is cancelled or closed."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._program is not None:
                began, self.problem = time.monotonic(), None
                await self._program.send(self._where)
                how = await self._program.ended()
                if self._closed:
                    return
                self.problem = f"the agent program of the environment ended ({how})"
                self._program = None
                self._agent_gone(self.problem)
                if time.monotonic() - began > _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
            logger.warning("%s; starting another in %g s", self.problem, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.restarts += 1
            try:
                await self.start()
            except ConfigError as error:
                self.problem = str(error)

    async def close(self) -> None:
        self._closed = True
        if self._program is not None:
            await self._program.terminate()


async def rows(section: EnvironmentSection, max_rows: int | None, source: str) -> AsyncIterator[dict[str, Any]]:
    """The first rows of the environment's dataset, or of the file `source` of an agent that has none. Raises
    ConfigError if the program cannot send them."""
    program = await _Program.start(section, {"kind": "rows", "max_rows": max_rows, "source": source})
    try:
        while "end" not in (message := await program.receive()):
            yield message
    finally:
        await program.terminate()


def _found(python: str) -> str:
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(
            f"environment.options.python: {python} is no program; name the Python of a virtual environment"
        )
    return found
