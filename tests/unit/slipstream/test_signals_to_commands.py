"""A signal to a command of ours at a moment at which Python drops an exception, or a library takes it: the command ends."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from tests.moments import MOMENTS

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).parents[3]
CONFIG = ("--config", "run.yaml")
LOADING = "protocol.config.loader.read"
PROGRAM = """
import asyncio, pkgutil, runpy, signal, sys, time
from tests.moments import MOMENTS

moment, place, module = sys.argv[1:4]
number = signal.SIGINT if module == "slipstream" else signal.SIGTERM  # of which Python's own handler raises
del sys.argv[1:4]

def come(*given, **more):
    MOMENTS[moment](number)
    print("still here", flush=True)
    time.sleep(60)

async def come_and_wait(pair):
    MOMENTS[moment](number)
    while not pair.is_stopping:
        await asyncio.sleep(0.01)
    return 0

def come_and_go_on(*given, **more):
    MOMENTS[moment](number)
    return real(*given, **more)

def come_and_sleep(*given):
    MOMENTS[moment](number)
    given[-1](60)

acts = {"Pair.run": come_and_wait, "Watch.look": come_and_go_on, "session.start_here": come_and_sleep}
name, act = next(((name, act) for name, act in acts.items() if place.endswith(name)), ("", come))
owner, _, attribute = place.rpartition(".")
owner = pkgutil.resolve_name(owner)
real = getattr(owner, attribute)
setattr(owner, attribute, act)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
DAEMONS = [
    ("producer.app.cli", (*CONFIG, "--gpu", "cpu"), LOADING, ExitCode.OK),
    (
        "producer.app.cli",
        ("--connect", "ipc:///nowhere"),
        "slipstream_extras.bundle.joining.BundleFetch.run",
        ExitCode.OK,
    ),
    ("consumer.app.cli", (*CONFIG, "--gpu", "cpu"), LOADING, ExitCode.OK),
    ("consumer.app.cli", (*CONFIG, "--check"), LOADING, ExitCode.INTERRUPTED),
]
COMMANDS = [
    ("run", CONFIG, LOADING, ExitCode.INTERRUPTED),
    ("run", CONFIG, "slipstream.pair.Pair.run", ExitCode.OK),
    ("sft", CONFIG, LOADING, ExitCode.INTERRUPTED),
    ("export", CONFIG, LOADING, ExitCode.INTERRUPTED),
    ("reward", ("try", *CONFIG), LOADING, ExitCode.INTERRUPTED),
    ("environment", ("rows", *CONFIG, "--to", "rows.jsonl"), LOADING, ExitCode.INTERRUPTED),
    ("status", ("--once", *CONFIG), LOADING, ExitCode.INTERRUPTED),
    ("status", CONFIG, "slipstream.status.watch.Watch.look", ExitCode.OK),
    ("view", CONFIG, LOADING, ExitCode.INTERRUPTED),
    ("view", CONFIG, "slipstream_extras.view.server.app.serve", ExitCode.OK),
    ("journal", ("stats", *CONFIG), LOADING, ExitCode.INTERRUPTED),
    ("cluster", ("up", *CONFIG), LOADING, ExitCode.INTERRUPTED),
    ("cluster", ("up", *CONFIG), "slipstream_extras.ray.session.start_here", ExitCode.INTERRUPTED),
    ("keys", ("generate", "gpu01"), "protocol.channel.keys.generate", ExitCode.INTERRUPTED),
    ("env", (), "slipstream.env.installed_version", ExitCode.INTERRUPTED),
    ("init", (), "slipstream.init._rows", ExitCode.INTERRUPTED),
]


def ended(folder: Path, moment: str, place: str, module: str, *arguments: str) -> tuple[int, str, str]:
    (folder / "run.yaml").write_text(
        "{run_dir: run, model: {path: m}, dataset: {path: d}, rewards: {functions: [{function: exact_match}]}}\n"
    )
    (folder / "run").mkdir()
    command = [sys.executable, "-c", PROGRAM, moment, place, module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return shown.returncode, shown.stdout, shown.stderr


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("module", "arguments", "place", "code"), DAEMONS)
def test_a_daemon_that_starts_ends(
    tmp_path: Path, moment: str, module: str, arguments: tuple[str, ...], place: str, code: ExitCode
) -> None:
    assert ended(tmp_path, moment, place, module, *arguments) == (code, "", "")


@pytest.mark.parametrize(
    ("moment", "command", "arguments", "place", "code"),
    [(moment, *command) for moment, command in zip(itertools.cycle(MOMENTS), COMMANDS, strict=False)],
)
def test_a_command_ends(
    tmp_path: Path, moment: str, command: str, arguments: tuple[str, ...], place: str, code: ExitCode
) -> None:
    status, out, errors = ended(tmp_path, moment, place, "slipstream", command, *arguments)
    assert (status, errors) == (code, "")
    assert "still here" not in out
