"""The reward worker: a process that makes its reward functions once and then scores group after group, in its main thread.

Guarantee: unless a function blocks or kills the process, its result is returned as a value or as a reason. The process is run by
`producer.rewards.workers` as `python -m producer.rewards.worker FD SOURCES`.
"""

import asyncio
import inspect
import math
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from producer.rewards.contract import NOT_COLUMNS, Logbook, Taken
from producer.rewards.messages import Answer, Call, Failure, Job, Ready, Scores, Source
from producer.rewards.spans import FLOAT32_MAX, Spans
from protocol.config.functions import load_function, load_plugin, make_plugin
from protocol.errors import ConfigError, DeviceError
from protocol.runtime.worker_channel import WorkerChannel, end_before_daemon, raised

_MAX_PROBLEM_CHARS = 500


class Made(NamedTuple):
    """A reward function that was made, and what it takes."""

    call: Callable[..., Any]
    taken: Taken

    @classmethod
    def of(cls, function: Callable[..., Any], place: str) -> "Made":
        """Raise ConfigError if no argument can be passed to it."""
        return cls(function, Taken.by(function, place))


def main(descriptor: int, sources: bytes) -> None:
    end_before_daemon()
    channel = WorkerChannel(descriptor)
    functions, problems, of_device = list[Made](), list[str](), False
    for source in msgspec.json.decode(sources, type=list[Source]):
        try:
            functions.append(Made.of(_function(source), source.place))
        except (ConfigError, DeviceError) as error:
            problems.append(str(error))
            of_device = of_device or isinstance(error, DeviceError)
    awaited = [index for index, made in enumerate(functions) if _is_asynchronous(made.call)]
    channel.send(Ready(problems, awaited, [made.taken.columns for made in functions], of_device))
    while not problems and (frame := channel.receive()) is not None:
        call = msgspec.msgpack.decode(frame, type=Call)
        called = [functions[index] for index in call.functions]
        asynchronous = _is_asynchronous(called[0].call)
        channel.send(
            Answer(asyncio.run(_together(called, call)) if asynchronous else [_score(called[0], call.jobs[0])])
        )


def _function(source: Source) -> Callable[..., Any]:
    if source.is_model:
        from protocol.config.reward_options import RewardModel  # only here: importing it takes as long as all else

        reward_model = load_plugin("slipstream.reward_models", "transformers", "rewards.functions")
        made: Callable[..., Any] = reward_model(source.place, RewardModel.model_validate(source.options))
        return made
    if ":" in source.place:
        return load_function(source.place, "rewards.functions")
    made = make_plugin("slipstream.rewards", source.place, source.options, "rewards.functions")
    if not callable(made):
        raise ConfigError(
            f"rewards.functions: plugin {source.place} made a {type(made).__name__}, which is not callable"
        )
    return made


def _is_asynchronous(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def _together(functions: list[Made], call: Call) -> list[Scores]:
    return await asyncio.gather(*map(_await_one, functions, call.jobs, call.limits_s))


async def _await_one(function: Made, job: Job, limit_s: float) -> Scores:
    started, book = time.monotonic(), Logbook(len(job.completions))
    try:
        async with asyncio.timeout(limit_s) as limit:
            scores = checked(await function.call(**function.taken.of(_arguments(job, book))), job)
    except Exception:
        late = Scores(None, f"did not return within {limit_s:g} seconds", "timeout")
        scores = late if limit.expired() else Scores(None, _raised())
    return msgspec.structs.replace(scores, seconds=time.monotonic() - started, logged=book.logged)


def _score(function: Made, job: Job) -> Scores:
    started, book = time.monotonic(), Logbook(len(job.completions))
    try:
        returned = function.call(**function.taken.of(_arguments(job, book)))
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        scores = checked(returned, job)
    except MemoryError:
        scores = Scores(None, "ran out of memory", "memory")
    except Exception:
        scores = Scores(None, _raised())
    return msgspec.structs.replace(scores, seconds=time.monotonic() - started, logged=book.logged)


def _raised() -> str:
    """Return the exception that is handled, and what helps where a decorator hides what its function takes."""
    problem = raised()
    hint = "\nGive it **kwargs: a function whose decorator takes all arguments gets all of them, as in TRL"
    return problem + hint if "unexpected keyword argument" in problem.splitlines()[-1] else problem


def _arguments(job: Job, book: Logbook) -> dict[str, Any]:
    """Return what TRL passes, but `environments`, which live in other processes."""
    count = len(job.completions)
    arguments = {key: [value] * count for key, value in job.columns.items() if key not in NOT_COLUMNS}
    if job.reasoning_tokens:
        arguments["reasoning_tokens"] = job.reasoning_tokens
    return arguments | {
        "prompts": [job.prompt] * count,
        "completions": job.completions,
        "completion_ids": job.completion_ids,
        "trainer_state": job.state,
        "log_extra": book.log_extra,
        "log_metric": book.log_metric,
    }


def checked(returned: Any, job: Job) -> Scores:
    """Return the scores in the value that a function returned: a number, spans, None or an exception for each completion, in
    anything that gives one after the other, such as a list, an array, a tensor or a generator."""
    count = len(job.completions)
    if isinstance(returned, str | bytes | dict | set | frozenset) or not _has_items(returned):
        problem = f"returned a {type(returned).__name__}; return a list with one number or None per completion"
        return Scores(None, problem, "invalid")
    if not isinstance(returned, list | tuple):
        returned = list(islice(returned, count + 1))  # a generator may have no end
    if len(returned) != count:
        problem = f"returned {len(returned)} rewards for {count} completions; return one per completion"
        return Scores(None, problem, "invalid")
    rewards = [math.nan] * count
    failed: dict[int, tuple[Failure, str]] = {}
    spans: dict[int, Spans] = {}
    for index, reward in enumerate(returned):
        if isinstance(reward, Exception):
            detail = f"reward {index}: {reward!s:.{_MAX_PROBLEM_CHARS}}"
            failed[index] = "timeout" if isinstance(reward, TimeoutError) else "raised", detail
        elif reward is not None:
            try:
                if isinstance(reward, dict):
                    spans[index] = Spans.of(reward, job.completions[index], len(job.completion_ids[index]))
                    reward = sum(spans[index].rewards)
                rewards[index] = _number(reward)
            except ValueError as error:
                failed[index] = "invalid", f"reward {index} {error}"
    if failed and len(failed) == count:
        reason, problem = failed[0]
        return Scores(None, problem, reason)
    return Scores(rewards, failed=failed, spans={row: each for row, each in spans.items() if row not in failed})


def _has_items(returned: Any) -> bool:
    try:
        iter(returned)
    except TypeError:  # also of a tensor without dimensions
        return False
    return True


def _number(reward: Any) -> float:
    if hasattr(reward, "item"):  # of an array or a tensor, of whatever type and also with a gradient
        try:
            reward = reward.item()
        except Exception as error:
            raise ValueError(f"of type {type(reward).__name__} is no number: {error!s:.{_MAX_PROBLEM_CHARS}}") from None
    if not hasattr(type(reward), "__float__"):
        raise ValueError(f"is {reward!r:.80}; return a number, or None for missing")
    try:
        value = float(reward)
    except Exception as error:
        raise ValueError(f"of type {type(reward).__name__} is no number: {error!s:.{_MAX_PROBLEM_CHARS}}") from None
    if abs(value) > FLOAT32_MAX:
        raise ValueError(f"is {value}; return a finite number, or None for missing")
    return value


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].encode())
