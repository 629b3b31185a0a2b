"""The life of an agent program, which `producer.environments.agent_program` starts.

Guarantee: its first line on standard output says that it can play, or why not. Only its messages are written there, whatever the
environment prints. It ends when its parent does, however that ends, with all that it started. SIGTERM ends it with status 0.

    standard input                                       standard output
    {"kind": "play" or "rows", ...}            ->
                                               <-        {"ready": true}, or {"problem": "..."}
    {"base_url": ..., "key": ...}              ->        nothing; or with "rows": a row per line, then {"end": true}
"""

import asyncio
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, NoReturn, TextIO

from producer.environments.bridges.task_loop import Environment, PolicyEndpoint, TaskLoop

logger = logging.getLogger(__name__)


class ProblemError(Exception):
    """Why nothing can be played; the text is for the user."""


def row_of(task: dict[str, Any]) -> dict[str, Any]:
    """Returns the environment's part of the task's row. Raises ProblemError if the row has none."""
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
    """The messages with the text of their content, or of its parts."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        found.append({"role": message["role"], "content": content if isinstance(content, str) else ""})
    return found


def main(load: Callable[[dict[str, Any]], Environment]) -> NoReturn:
    """Runs the program. `load`: the environment that settings describe; what it raises is the problem."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="environment: %(message)s")
    logging.getLogger("producer.environments.bridges").setLevel(logging.INFO)
    output, lines = _private_output(), _lines_of_parent()
    settings = json.loads(lines.get())
    try:
        environment = load(settings)
        if settings["kind"] == "rows":
            _send(output, {"ready": True})
            for row in islice(environment.rows(settings["max_rows"]), settings["max_rows"]):
                _send(output, row)
            _send(output, {"end": True})
            _leave(0)
    except Exception as error:
        logger.debug("it failed here:", exc_info=True)
        said = str(error) if isinstance(error, ProblemError) else f"{type(error).__name__}: {error}"
        _send(output, {"problem": said})
        _leave(1)
    _send(output, {"ready": True})
    settings |= json.loads(lines.get())
    with suppress(asyncio.CancelledError):
        asyncio.run(_play(environment, settings))
    _leave(0)


async def _play(environment: Environment, settings: dict[str, Any]) -> None:
    current, base_url, key = asyncio.current_task(), settings["base_url"], settings["key"]
    assert current is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
    endpoint = PolicyEndpoint(base_url, key, settings["max_concurrent"] + 1)
    async with environment.playing(base_url, key):
        slots = asyncio.Semaphore(settings["max_concurrent"])
        await TaskLoop(endpoint, environment, slots, settings["episode_timeout_s"]).run()


def _private_output() -> TextIO:
    """Returns standard output, and makes descriptor 1 standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _lines_of_parent() -> "queue.Queue[str]":
    """The lines of standard input, from which nobody else reads; at its end this process and its group are killed."""
    source = os.fdopen(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in source:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _send(output: TextIO, message: dict[str, Any]) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()


def _leave(status: int) -> NoReturn:
    """Without waiting for threads that wait for tasks."""
    logging.shutdown()
    os._exit(status)
