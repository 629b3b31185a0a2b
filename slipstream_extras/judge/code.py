"""The reward `code`: whether the program in a completion passes its tests.

Guarantee: a completion's code runs in the sandbox (`slipstream_extras.judge.sandbox`) or not at all. No test enters that sandbox:
expected output is compared outside. Tests in Python run in a second sandbox and call the code's functions from there. Both
sandboxes have ended before the result of a test is returned.
"""

import asyncio
import re
import secrets
import socket
from collections.abc import Callable, Coroutine
from importlib import resources
from typing import Any

from producer.rewards.builtin import Results, column_of, text_of
from protocol.config.reward_options import Code
from protocol.wire.answers import text_of_value
from slipstream_extras.judge.sandbox import Limits, Sandbox

_SCRIPT = """\
import sys, types
for name, text in {texts!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules[name].run{arguments!r}
"""
_BLOCK = re.compile(r"```[ \t]*+(?:python|py)?[ \t]*+\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def code(**given: Any) -> Callable[..., Coroutine[Any, Any, Results]]:
    options = Code(**given)
    limits = Limits(options.time_s, options.memory_bytes, options.memory_bytes // 4, options.processes)
    sandbox = Sandbox(limits, options.python)
    asyncio.run(sandbox.check())

    async def score_all(completions: list[Any], **columns: Any) -> Results:
        slots = asyncio.Semaphore(options.parallel)

        async def within_limits(source: str, test: Any) -> bool:
            async with slots:
                return await _passes(sandbox, source, test)

        async def score(completion: Any, tests: Any) -> float:
            source, listed = program_of(text_of(completion)), _listed(tests, options.column)
            if options.score == "share":
                return sum(await asyncio.gather(*(within_limits(source, test) for test in listed))) / len(listed)
            for test in listed:
                if not await within_limits(source, test):
                    return 0.0
            return 1.0

        tests = column_of(columns, options.column)
        found = await asyncio.gather(*map(score, completions, tests), return_exceptions=True)
        return [result if isinstance(result, float | Exception) else None for result in found]

    return score_all


def program_of(text: str) -> str:
    """Return the last fenced block of Python or of no language, or the whole text if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _listed(tests: Any, column: str) -> list[Any]:
    listed = [tests] if isinstance(tests, str) else tests
    right = isinstance(listed, list) and all(
        isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= test.keys()) for test in listed
    )
    if not right or not listed:
        raise ValueError(
            f"column {column!r} has {tests!r:.80}; expected Python, a list of such texts, or a list of {{input, output}}"
        )
    ends = ("input", "output")
    return [
        test if isinstance(test, str) else {end: text_of_value(test[end], f"{column}.{end}") for end in ends}
        for test in listed
    ]


async def _passes(sandbox: Sandbox, source: str, test: Any) -> bool:
    if isinstance(test, str):
        return await passes(sandbox, source, test)
    outcome = await sandbox.run(source, test["input"].encode())
    return outcome.ended_well and _lines(outcome.output.decode(errors="replace")) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    """Return the lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def passes(sandbox: Sandbox, source: str, test: str) -> bool:
    """Return whether the test, Python that uses the program's names, reaches its end. Raise ConfigError if a sandbox
    could not be set up."""
    mark = secrets.token_hex(16)
    ends = socket.socketpair()
    scripts = (
        _script(("values", "program_side"), ends[0].fileno(), source),
        _script(("values", "program_side", "judge"), ends[1].fileno(), test, mark),
    )
    program, judge = (
        asyncio.ensure_future(sandbox.run(text, channel=end)) for text, end in zip(scripts, ends, strict=True)
    )
    try:
        outcome = await judge
    finally:
        for end in ends:
            end.close()
        program.cancel()
        judge.cancel()
        await asyncio.wait({program, judge})
    return outcome.ended_well and outcome.output.endswith(mark.encode())


def _script(modules: tuple[str, ...], *arguments: int | str) -> str:
    """Return modules of this package as one program. It ends by calling `run` of the last with these arguments."""
    folder = resources.files("slipstream_extras.judge")
    texts = [(f"slipstream_extras.judge.{name}", (folder / f"{name}.py").read_text()) for name in modules]
    return _SCRIPT.format(texts=texts, arguments=arguments)
