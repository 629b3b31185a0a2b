"""One reward worker: a process that makes its reward functions once and then scores group after group, in its main thread.

Guarantee: unless a function blocks or kills the process, its result comes back as a value or as a reason. The process is run by
`producer.rewards.processes` as `python -m producer.rewards.worker FD SOURCES`.
"""

import asyncio
import contextlib
import inspect
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from producer.interfaces import Failure
from protocol.config.functions import load_function
from protocol.errors import ConfigError, DeviceError
from protocol.runtime.worker_channel import WorkerChannel, raised

FLOAT32_MAX = 3.4028234663852886e38
_PROBLEM_CHARACTERS = 500
_NOT_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")
_KILLED_FIRST = "1000"  # of oom_score_adj: when the host is out of memory, a worker goes before the engine


class Source(msgspec.Struct, frozen=True):
    """Where a reward function comes from: the user's, by name, or one of `producer.rewards.builtin`, with its options."""

    function: str = ""
    shipped: str = ""
    options: dict[str, Any] = {}


class Job(msgspec.Struct, frozen=True):
    """One group to score. The worker repeats prompt and columns for every completion, as TRL does."""

    prompt: Any
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, Any]
    reasoning_tokens: list[int] = []  # of each completion, for the function that asks for them


class Call(msgspec.Struct, frozen=True):
    """Asks for the functions of these indexes; several only if all are asynchronous, whose limits the worker enforces. The
    producer enforces those of the others."""

    functions: list[int]
    jobs: list[Job]
    limits_s: list[float]


class Scores(msgspec.Struct, frozen=True):
    """The scores of one function: a float per completion (NaN for missing), or why there are none."""

    rewards: list[float] | None
    problem: str = ""
    reason: Failure = "raised"
    failed: dict[int, tuple[Failure, str]] = {}  # completions that failed alone, by index; their rewards are NaN
    seconds: float = 0.0  # that the function took, if the worker knows
    is_final: bool = False  # whether another attempt would give the same


class Answer(msgspec.Struct, frozen=True):
    """Scores of the functions of a call, in its order."""

    scores: list[Scores]


class Ready(msgspec.Struct, frozen=True):
    """First frame of a worker: the functions that could not be made, and the indexes of those that are asynchronous."""

    problems: list[str]
    asynchronous: list[int] = []
    of_device: bool = False  # whether a GPU is one of the problems


def main(descriptor: int, sources: bytes) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST)
    channel = WorkerChannel(descriptor)
    functions, problems, of_device = [], list[str](), False
    for source in msgspec.json.decode(sources, type=list[Source]):
        try:
            functions.append(_function(source))
        except (ConfigError, DeviceError) as error:
            problems.append(str(error))
            of_device = of_device or isinstance(error, DeviceError)
    awaited = [index for index, made in enumerate(functions) if _is_asynchronous(made)]
    channel.send(Ready(problems, awaited, of_device))
    while not problems and (frame := channel.receive()) is not None:
        call = msgspec.msgpack.decode(frame, type=Call)
        called = [functions[index] for index in call.functions]
        asynchronous = _is_asynchronous(called[0])
        channel.send(
            Answer(asyncio.run(_together(called, call)) if asynchronous else [_score(called[0], call.jobs[0])])
        )


def _function(source: Source) -> Callable[..., Any]:
    if source.function:
        return load_function(source.function, "rewards.functions")
    from producer.rewards.builtin import make

    return make(source.shipped, source.options)


def _is_asynchronous(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def _together(functions: list[Callable[..., Any]], call: Call) -> list[Scores]:
    return await asyncio.gather(*map(_await_one, functions, call.jobs, call.limits_s))


async def _await_one(function: Callable[..., Any], job: Job, limit_s: float) -> Scores:
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s) as limit:
            scores = checked(await function(**_arguments(job)), len(job.completions))
    except Exception:
        over = Scores(None, f"did not return within {limit_s:g} seconds", "timeout")
        scores = over if limit.expired() else Scores(None, raised())
    return msgspec.structs.replace(scores, seconds=time.monotonic() - started)


def _score(function: Callable[..., Any], job: Job) -> Scores:
    started = time.monotonic()
    try:
        returned = function(**_arguments(job))
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        scores = checked(returned, len(job.completions))
    except MemoryError:
        scores = Scores(None, "ran out of memory", "memory")
    except Exception:
        scores = Scores(None, raised())
    return msgspec.structs.replace(scores, seconds=time.monotonic() - started)


def _arguments(job: Job) -> dict[str, Any]:
    count = len(job.completions)
    repeated = {key: [value] * count for key, value in job.columns.items() if key not in _NOT_COLUMNS}
    if job.reasoning_tokens:
        repeated["reasoning_tokens"] = job.reasoning_tokens
    ours = {"prompts": [job.prompt] * count, "completions": job.completions, "completion_ids": job.completion_ids}
    return ours | repeated


def checked(returned: Any, count: int) -> Scores:
    """Checks what a function returned: a number, None or an exception for each completion."""
    problem = ""
    if not isinstance(returned, list | tuple):
        problem = f"returned a {type(returned).__name__}; return a list with one number or None per completion"
    elif len(returned) != count:
        problem = f"returned {len(returned)} rewards for {count} completions; return one per completion"
    if problem:
        return Scores(None, problem, "invalid")
    rewards = [math.nan] * count
    failed: dict[int, tuple[Failure, str]] = {}
    for index, reward in enumerate(returned):
        if isinstance(reward, Exception):
            said = f"reward {index}: {reward!s:.{_PROBLEM_CHARACTERS}}"
            failed[index] = "timeout" if isinstance(reward, TimeoutError) else "raised", said
        elif reward is not None:
            try:
                rewards[index] = _number(reward)
            except ValueError as error:
                failed[index] = "invalid", f"reward {index} {error}"
    if failed and len(failed) == count:
        reason, problem = failed[0]
        return Scores(None, problem, reason)
    return Scores(rewards, failed=failed)


def _number(reward: Any) -> float:
    if not hasattr(type(reward), "__float__"):
        raise ValueError(f"is {reward!r:.80}; return a number, or None for missing")
    try:
        value = float(reward)
    except Exception as error:
        said = f"{error!s:.{_PROBLEM_CHARACTERS}}"
        raise ValueError(f"of type {type(reward).__name__} is no number: {said}") from None
    if abs(value) > FLOAT32_MAX:
        raise ValueError(f"is {value}; return a finite number, or None for missing")
    return value


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].encode())
