"""One reward worker: a process that imports the reward functions once and then scores group after group.

Guarantee: whatever a function does short of blocking or killing the process comes back as a value or as a reason; what
it prints goes to standard error and never into the answer. Run by `producer.rewards` as
`python -m producer.reward_worker FD PARENT_PID FUNCTION...`, with frames of 4 bytes length and msgpack over socket FD.
"""

import asyncio
import inspect
import math
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from producer.lifeline import die_with_parent
from protocol.errors import ConfigError
from protocol.functions import load_function

LENGTH = struct.Struct("<I")
FLOAT32_MAX = 3.4028234663852886e38
_TRACEBACK_LINES = 6
_NOT_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")


class Job(msgspec.Struct, frozen=True):
    """One group to score. The worker repeats prompt and columns for every completion, as TRL does."""

    prompt: Any
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, Any]


class Scores(msgspec.Struct, frozen=True):
    """What one function said: a float per completion (NaN for missing), or why not."""

    rewards: list[float] | None
    problem: str = ""


class Ready(msgspec.Struct, frozen=True):
    """First frame of a worker: the functions that could not be imported."""

    problems: list[str]


def main(descriptor: int, parent_pid: int, specs: list[str]) -> None:
    die_with_parent(parent_pid)
    with socket.socket(fileno=descriptor) as connection:
        functions, problems = [], []
        for spec in specs:
            try:
                functions.append(load_function(spec, "rewards.functions"))
            except ConfigError as error:
                problems.append(str(error))
        _send(connection, Ready(problems))
        while not problems:
            frame = _receive(connection)
            if frame is None:
                return
            job = msgspec.msgpack.decode(frame, type=Job)
            for function in functions:
                scores = _score(function, job)
                _send(connection, scores)
                if scores.rewards is None:
                    break


def _score(function: Callable[..., Any], job: Job) -> Scores:
    count = len(job.completions)
    repeated = {key: [value] * count for key, value in job.columns.items() if key not in _NOT_COLUMNS}
    try:
        returned = function(
            prompts=[job.prompt] * count, completions=job.completions, completion_ids=job.completion_ids, **repeated
        )
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
    except Exception:
        lines = traceback.format_exc().strip().splitlines()[-_TRACEBACK_LINES:]
        return Scores(None, "raised\n" + "\n".join(lines))
    return _checked(returned, count)


def _checked(returned: Any, count: int) -> Scores:
    if not isinstance(returned, list | tuple):
        return Scores(
            None, f"returned a {type(returned).__name__}; return a list with one number or None per completion"
        )
    if len(returned) != count:
        return Scores(None, f"returned {len(returned)} rewards for {count} completions; return one per completion")
    rewards = []
    for index, reward in enumerate(returned):
        if reward is None:
            rewards.append(math.nan)
            continue
        if not hasattr(type(reward), "__float__"):
            return Scores(None, f"reward {index} is {reward!r:.80}; return a number, or None for missing")
        try:
            value = float(reward)
        except Exception as error:
            return Scores(None, f"reward {index} of type {type(reward).__name__} is no number: {error}")
        if abs(value) > FLOAT32_MAX:
            return Scores(None, f"reward {index} is {value}; return a finite number, or None for missing")
        rewards.append(value)
    return Scores(rewards)


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket) -> bytes | None:
    """The next frame; None when the daemon has closed its end."""
    with connection.makefile("rb") as stream:
        prefix = stream.read(LENGTH.size)
        return stream.read(LENGTH.unpack(prefix)[0]) if len(prefix) == LENGTH.size else None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
