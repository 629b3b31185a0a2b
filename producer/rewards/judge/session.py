"""A program and its test, each in a sandbox of its own, with a socket between them.

Guarantee: that of the package; both sandboxes have ended when `passes` returns.
"""

import asyncio
import secrets
import socket
from importlib import resources

from producer.rewards.sandbox.run import Sandbox

_SCRIPT = """\
import sys, types
for name, text in {texts!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules[name].run{arguments!r}
"""


async def passes(sandbox: Sandbox, source: str, test: str) -> bool:
    """Whether the test, Python that uses the program's names, reaches its end. Raises ConfigError if a sandbox could
    not be set up."""
    mark = secrets.token_hex(16)
    ends = socket.socketpair()
    scripts = (
        _script(("values", "judged"), ends[0].fileno(), source),
        _script(("values", "judged", "judge"), ends[1].fileno(), test, mark),
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
    """Modules of this package as one program, which ends by calling `run` of the last with these arguments."""
    folder = resources.files("producer.rewards.judge")
    texts = [(f"producer.rewards.judge.{name}", (folder / f"{name}.py").read_text()) for name in modules]
    return _SCRIPT.format(texts=texts, arguments=arguments)
