"""The command `slipstream`: what all subcommands have in common."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from protocol.config.loader import RESOLVED_FILE
from protocol.errors import ConfigError, ExitCode
from slipstream import cli
from slipstream.cli import run, slipstream
from tests.unit.protocol.config.files import MINIMAL, write_inputs

pytestmark = pytest.mark.usefixtures("own_logging")

REPOSITORY = Path(__file__).parents[3]
HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "trl",
    "peft",
    "datasets",
    "numpy",
    "zmq",
    "apsw",
    "ray",
    "rich",
    "asyncio",
    "pydantic",
)


def paths(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every subcommand."""
    found = [path] if path else []
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found += paths(inner, (*path, name))
    return found


@pytest.mark.long
def test_every_subcommand_has_help_that_imports_nothing_heavy() -> None:
    """Each in its words, so that `--help` and completion take a fraction of a second."""
    lines = [[*path, "--help"] for path in paths(slipstream)]
    assert len(lines) > 25
    program = (
        f"import sys\nfrom slipstream.cli import run\nfor line in {lines}:\n    assert run(line) == 0, line\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (shown.stderr, shown.returncode) == ("[]\n", 0)


@pytest.mark.long
def test_the_module_is_the_command_and_takes_little_time_to_say_how_it_is_used() -> None:
    used_s = []
    for _ in range(2):  # the first may compile what it imports
        before = os.times()
        shown = subprocess.run(
            [sys.executable, "-m", "slipstream", "--help"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )
        used_s.append(sum(os.times()[2:4]) - sum(before[2:4]))
    assert all(f"\n  {name} " in shown.stdout for name in cli._COMMANDS)
    assert min(used_s) < 0.3, "of the CPU; 0.1 s on a quiet machine"
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"rl-producer", "rl-trainer", "slipstream"}
    assert scripts["slipstream"] == "slipstream.cli:main"


@pytest.mark.long
@pytest.mark.parametrize(("words", "completion"), [("slipstream jou", "journal"), ("slipstream journal --ru", "--run")])
def test_a_shell_completes_subcommands_and_options(words: str, completion: str) -> None:
    variables = {
        "_SLIPSTREAM_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    shown = subprocess.run(
        [sys.executable, "-m", "slipstream"], env=os.environ | variables, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert shown.stdout.splitlines() == [f"plain,{completion}"]


@pytest.mark.parametrize(
    ("line", "path", "says"),
    [
        ("jou", "slipstream", "No such command 'jou'"),
        ("status --nothing", "slipstream status", "--nothing"),
        ("journal list --run a --config b", "slipstream journal list", "exclude each other"),
        ("keys generate", "slipstream keys generate", "NAME"),
        ("sft", "slipstream sft", "give --run, or --config"),
        ("export --run a --config b", "slipstream export", "give --run, or --config"),
        ("reward try --config a --n 0", "slipstream reward try", "--n"),
        ("environment rows --config a", "slipstream environment rows", "--to"),
        ("cluster scale --producers 0", "slipstream cluster scale", "--producers"),
        ("cluster up --config a --gpus -1", "slipstream cluster up", "--gpus"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_help(
    line: str, path: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert told.startswith("slipstream")
    assert says in told
    assert told.endswith(f"; see {path} --help\n")
    assert told.count("\n") == 1


def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["journal"]) == ExitCode.USAGE
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.long
def test_checks_show_the_configuration_and_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    write_inputs(tmp_path)
    heavy = set(HEAVY) - {"pydantic", "asyncio", "zmq"}
    program = (
        "import sys\nfrom slipstream.cli import run\n"
        "codes = [run([command, '--config', 'run.yaml', '--check']) for command in ('run', 'sft', 'export')]\n"
        f"print([name for name in {sorted(heavy)} if name in sys.modules], codes, file=sys.stderr)"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert shown.stderr == "[] [0, 0, 0]\n"
    assert shown.stdout.count("run_dir: ") == 3


def test_the_configuration_of_a_run_is_that_of_its_folder_wherever_that_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "it is: here"
    assert run(["export", "--run", str(folder), "--check"]) == ExitCode.CONFIG
    assert f"there is no {folder / RESOLVED_FILE}, which rl-trainer writes at its start" in capsys.readouterr().err
    folder.mkdir()
    (folder / RESOLVED_FILE).write_text(MINIMAL + "seed: 7\n")
    write_inputs(folder)
    for command in ("export", "sft"):
        assert run([command, "--run", str(folder), "--set", "lora.r=12", "--check"]) == ExitCode.OK
        shown = yaml.safe_load(capsys.readouterr().out)
        assert (shown["run_dir"], shown["seed"], shown["lora"]["r"]) == (str(folder), 7, 12)


def test_errors_end_with_their_own_codes(
    stubs_are_slipstream: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: BaseException) -> None:
        raise error

    for error, code, says in (
        (ConfigError("the key is wrong"), ExitCode.CONFIG, "slipstream env: error: the key is wrong\n"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, ""),
        (KeyError("a bug"), ExitCode.BUG, "please report it with its traceback\n"),
    ):
        command = slipstream.get_command(click.Context(slipstream), "env")
        monkeypatch.setattr(command, "callback", lambda error=error: failing(error))
        assert run(["env"]) == code
        assert capsys.readouterr().err.endswith(says)


def test_versions_for_a_report_of_a_bug_are_there_without_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert re.search(r"^slipstream \d+\.\d+\.\d+$", told, re.M)
    assert re.search(r"^trl (\d+\.\d+\.\d+|is not installed)$", told, re.M)
    assert "\ngpu " in told


@pytest.mark.parametrize("command", [cli.sft, cli.export, cli.score, cli.try_rewards])
@pytest.mark.parametrize(("gpus", "expected"), [([], "cpu"), (["GPU-1"], "0")])
def test_a_command_that_names_no_gpu_takes_the_first_or_the_cpu(
    command: click.Command, gpus: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "visible_gpus", lambda given: gpus)
    [option] = [parameter for parameter in command.params if parameter.name == "gpu"]
    context = click.Context(command)
    assert option.callback is not None
    assert option.callback(context, option, None) == expected
    assert option.callback(context, option, "1") == "1"
