"""The agent program: the process in which a plugin plays the episodes of another library's environment.

Guarantee: it runs in a Python of its own, in which nothing of Slipstream has to be installed: this module and the plugins of
`slipstream_extras.environments` import the standard library, each other and the library whose environments they play. Its first
frame reports that it can play, or why not. It ends with the producer, with all that it started (`protocol.runtime.keeper`).
SIGTERM ends it with status 0.

    from the producer                                    to the producer, frames of JSON (`protocol.runtime.worker_channel`)
    {"kind": "play" or "rows", ...}            ->
                                               <-        {"ready": true}, or {"problem": "..."}
    {"base_url", "key", "environment"}            ->        nothing; or with "rows": a frame per row, then {"end": true}
"""

import asyncio
import importlib
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from itertools import islice
from typing import Any, NoReturn

from producer.environments.task_loop import Environment, PolicyEndpoint, TaskLoop
from protocol.runtime.worker_channel import WorkerChannel, end_before_daemon

logger = logging.getLogger(__name__)


class ProblemError(Exception):
    """The environment cannot be played; the text tells the user why."""


def row_of(task: dict[str, Any]) -> dict[str, Any]:
    """Return the environment's part of the task's row. Raise ProblemError if the row has none."""
    text = task["columns"].get("task")
    try:
        row = json.loads(text)
    except (TypeError, ValueError):
        row = None
    if not isinstance(row, dict):
        raise ProblemError(
            "the row has no `task` of an environment; make the dataset with `slipstream environment rows`"
        )
    return row


def plain(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the messages with the text of their content, or of its parts."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        found.append({"role": message["role"], "content": content if isinstance(content, str) else ""})
    return found


def main(descriptor: str, _root: str, folder: str, plugin: str) -> NoReturn:
    """Run `plugin`, `module:load` with its module or package in `folder`. `load` makes the environment that settings describe, or
    raises the problem."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="environment: %(message)s")
    logging.getLogger("producer.environments").setLevel(logging.INFO)
    end_before_daemon()
    channel = WorkerChannel(int(descriptor))
    settings = _received(channel)
    try:
        environment = _plugin(folder, plugin)(settings)
        if settings["kind"] == "rows":
            _send(channel, {"ready": True})
            for row in islice(environment.rows(settings["max_rows"]), settings["max_rows"]):
                _send(channel, row)
            _send(channel, {"end": True})
            _leave(0)
    except Exception as error:
        logger.debug("it failed here:", exc_info=True)
        problem = str(error) if isinstance(error, ProblemError) else f"{type(error).__name__}: {error}"
        _send(channel, {"problem": problem})
        _leave(1)
    _send(channel, {"ready": True})
    settings |= _received(channel)
    with suppress(asyncio.CancelledError):
        asyncio.run(_play(environment, settings))
    _leave(0)


def _plugin(folder: str, plugin: str) -> Any:
    """Import the plugin from `folder` and not from the run's folder, which may have files of any name. The Python of the
    environment need not know -P."""
    module, _, name = plugin.partition(":")
    sys.path[0] = folder
    load = getattr(importlib.import_module(module), name)
    sys.path[0] = ""
    return load


async def _play(environment: Environment, settings: dict[str, Any]) -> None:
    current, base_url, key = asyncio.current_task(), settings["base_url"], settings["key"]
    assert current is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
    endpoint = PolicyEndpoint(base_url, key, settings["max_concurrent"] + 1, settings["environment"])
    async with environment.playing(base_url, key):
        slots = asyncio.Semaphore(settings["max_concurrent"])
        await TaskLoop(endpoint, environment, slots, settings["episode_timeout_s"]).run()


def _received(channel: WorkerChannel) -> dict[str, Any]:
    frame = channel.receive()
    if frame is None:
        _leave(0)
    message: dict[str, Any] = json.loads(frame)
    return message


def _send(channel: WorkerChannel, message: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(message).encode())


def _leave(status: int) -> NoReturn:
    """Exit without waiting for threads that wait for tasks."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
