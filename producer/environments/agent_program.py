"""The producer's side of the agent program, which plays the environment of another library (`producer.environments.program`).

Guarantee: before the engine is loaded, the program has loaded its environment, or the producer ends with the reason. Afterwards
there is one such program: when it ends, its tasks fail at once and another is started, after a pause that grows while programs
keep ending. It ends with the daemon.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from protocol.config.functions import ENVIRONMENT_PLUGINS, plugin_place
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from protocol.gpu.nvml import environment_of
from protocol.runtime.child import ChildEndedError, ChildProcess
from protocol.runtime.logs import Throttle
from protocol.runtime.processes import exit_text

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 900.0  # a download of a dataset included
_EXIT_GRACE_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_ROOT = Path(__file__).resolve().parents[2]
# `python -c` looks in the run's folder first. Our modules come from our own, because files of the user's may have their names.
_RUN = "import sys; sys.path[0] = sys.argv[2]; from producer.environments import program; program.main(*sys.argv[1:])"


async def _start(section: EnvironmentSection, work: dict[str, Any]) -> ChildProcess:
    """Start a program that plays or sends rows, and wait until it has loaded its environment. Raise ConfigError with the reason
    if it cannot."""
    place, options = f"{section.key}.agent: {section.agent}", section.options | section.agent_options.model_dump()
    settings = section.model_dump(include={"episode_timeout_s", "max_concurrent"}) | options | work
    command = [_found(options.get("python") or sys.executable), "-c", _RUN]
    arguments = [str(_ROOT), *plugin_place(ENVIRONMENT_PLUGINS, str(section.agent), f"{section.key}.agent")]
    try:
        program = ChildProcess(
            command, *arguments, throttle=Throttle(logger), source=place, environment=environment_of(section.gpu),
            grace_s=_EXIT_GRACE_S, codec=msgspec.json,
        )  # fmt: skip
    except ChildEndedError as error:
        raise ConfigError(f"{place}: the agent program has no process: {error}") from error
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            await program.send(settings)
            await _receive(program, place)
    except BaseException as error:
        await _terminate(program)
        if not isinstance(error, TimeoutError):
            raise
        raise ConfigError(f"{place}: the environment was not loaded within {_START_TIMEOUT_S:g} s") from None
    return program


async def _receive(program: ChildProcess, place: str) -> dict[str, Any]:
    """Return the program's next message. Raise ConfigError if it reports a problem, or has ended."""
    try:
        message = await program.receive(dict[str, Any])
    except ChildEndedError as error:
        await _terminate(program)
        raise ConfigError(f"{place}: the agent program failed: {error}; its last output is above") from None
    if "problem" in message:
        raise ConfigError(str(message["problem"]))
    return message


async def _terminate(program: ChildProcess) -> str:
    """End the program with everything that it started, with SIGTERM first. Return how it ended. The end goes on if this is
    cancelled."""
    status = await asyncio.shield(program.terminate())
    return "it does not end" if status is None else exit_text(status)


class AgentProgram:
    """Keeps one agent program playing the tasks of `environment` at the endpoint `base_url`, with `key` if there is one. When a
    program has ended, `agent_gone` is called with the reason."""

    def __init__(
        self,
        section: EnvironmentSection,
        base_url: str,
        key: str,
        agent_gone: Callable[[str], None] = lambda _: None,
        environment: str = "",
    ) -> None:
        self._section = section
        self._where = {"base_url": base_url, "key": key, "environment": environment}
        self._agent_gone = agent_gone
        self._program: ChildProcess | None = None
        self._closed = False
        self.restarts = 0
        self._problem: str | None = None

    def problem(self) -> str | None:
        """Return why no episode can be played now."""
        return self._problem

    async def start(self) -> None:
        """Start the program and wait until it has loaded its environment. Raise ConfigError if it cannot."""
        self._program = await _start(self._section, {"kind": "play"})

    async def run(self) -> None:
        """Let the program play, and start another when it has ended, until this is cancelled or closed."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._program is not None:
                began, self._problem = time.monotonic(), None
                await self._program.send(self._where)
                with contextlib.suppress(ChildEndedError):  # it sends nothing while it plays
                    await self._program.receive(dict[str, Any])
                how = await _terminate(self._program)
                if self._closed:
                    return
                self._problem = f"the agent program of {self._section.key} ended ({how})"
                self._program = None
                self._agent_gone(self._problem)
                if time.monotonic() - began > _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
            logger.warning("%s; starting another in %g s", self._problem, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.restarts += 1
            try:
                await self.start()
            except ConfigError as error:
                self._problem = str(error)

    async def close(self) -> None:
        self._closed = True
        if self._program is not None:
            await _terminate(self._program)


async def rows(section: EnvironmentSection, max_rows: int | None, source: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the first rows of the environment's dataset, or of the file `source` of an agent that has none. Raise ConfigError
    if the program cannot send them."""
    program = await _start(section, {"kind": "rows", "max_rows": max_rows, "source": source})
    try:
        while "end" not in (message := await _receive(program, f"{section.key}.agent: {section.agent}")):
            yield message
    finally:
        await _terminate(program)


def _found(python: str) -> str:
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(
            f"environment.options.python: {python} is no program; name the Python of a virtual environment"
        )
    return found
