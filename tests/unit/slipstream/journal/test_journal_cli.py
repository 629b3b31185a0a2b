"""`slipstream journal` itself: where the journal is, what goes wrong, what it imports."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest

from protocol.errors import ExitCode
from replay.journal.writer import Journal
from replay.rerolls import Verdict
from slipstream.cli import run
from slipstream.journal.cli import VERDICTS
from tests.unit.protocol.config.files import MINIMAL
from tests.unit.replay.journal.test_journal_reader import contents, entry
from tests.unit.slipstream.journal.command import Command

REPOSITORY = Path(__file__).parents[4]


EVERYTHING = [
    ["stats"],
    ["stats", "--json"],
    ["list", "--limit", "0"],
    ["list", "--json"],
    ["show", "0-0-0-1-s", "--tokens"],
    ["verify"],
    ["quarantine"],
    ["lineage", "1"],
]


@pytest.mark.parametrize("live", [True, False], ids=["live", "killed"])
def test_no_command_changes_the_journal(
    journal: Journal, capsys: pytest.CaptureFixture[str], tmp_path: Path, live: bool
) -> None:
    path = journal.path
    if not live:
        path = tmp_path / "killed" / "journal.sqlite"
        path.parent.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{journal.path}{suffix}", f"{path}{suffix}")
    before = contents(path)
    assert before["journal.sqlite-wal"]
    command = Command(path, capsys)
    for arguments in [*EVERYTHING, ["export", "--to", str(tmp_path / "x.jsonl")]]:
        assert command(*arguments)
        assert contents(path) == before


def test_every_command_on_an_empty_journal(command: Command, tmp_path: Path) -> None:
    Journal(command.run_dir / "journal.sqlite").close()
    assert command.lines("stats")[2:] == [
        "arrived       -",
        "steps         -",
        "policies      -",
        "dead letters  0",
        "quarantine    0 groups, 0 frames",
        "replays       0 uses of 0 groups",
    ]
    assert command.json("stats")[0]["steps"] == []
    assert command("list") == (
        "group  state  step  version  reward  verdict  tokens  prompt  reroll  replays  producer  arrived\n"
    )
    assert command.json("list") == command.json("quarantine") == []
    assert command("verify") == "read 0 groups, 0 B\n0 problems\n"
    for to in ("x.jsonl", "x.parquet"):
        assert command("export", "--to", str(tmp_path / to)) == f"0 groups in {tmp_path / to}\n"
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 0
    command("lineage", "1", code=ExitCode.JOURNAL)
    command("show", "0-0-0-1-s", code=ExitCode.JOURNAL)
    assert command.err == (
        f"slipstream journal: error: {command.run_dir}/journal.sqlite holds no group 0-0-0-1-s; "
        "`slipstream journal list` shows what it holds\n"
    )


def test_where_the_journal_is(
    journal: Journal, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(re.sub(r"(?m)^run_dir: .*$", f"run_dir: {tmp_path}/run", MINIMAL))
    monkeypatch.chdir(tmp_path / "run")
    for place in (["--run", str(journal.path)], ["--config", f"{tmp_path}/run.yaml"], []):
        assert run(["journal", *place, "list", "--limit", "1"]) == ExitCode.OK
        assert "0-10-0-1-s" in capsys.readouterr().out
        assert run(["journal", "list", *place, "--limit", "1"]) == ExitCode.OK
        assert "0-10-0-1-s" in capsys.readouterr().out
    assert run(["journal", "--config", "absent.yaml", "stats"]) == ExitCode.CONFIG
    assert capsys.readouterr().err.startswith("slipstream journal: error: absent.yaml: no such file. ")
    assert run(["journal", "--run", "absent", "stats"]) == ExitCode.JOURNAL
    assert capsys.readouterr().err == (
        "slipstream journal: error: absent/journal.sqlite: no such file; "
        "a journal is RUN_DIR/journal.sqlite, written by rl-trainer\n"
    )


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["list", "--step", "3:1"], "--step"),
        (["list", "--step", "x"], "--step"),
        (["list", "--reward", "x:1"], "--reward"),
        (["list", "--reward", "nan:1"], "--reward"),
        (["list", "--limit", "-1"], "--limit"),
        (["export", "--to", "x.csv"], "--to"),
        (["list", "--verdict", "bad"], "--verdict"),
        (["list", "--replays", "-1"], "--replays"),
        (["list", "--state", "gone"], "--state"),
    ],
)
def test_usage_errors_are_one_line(command: Command, arguments: list[str], flag: str) -> None:
    assert command(*arguments, code=ExitCode.USAGE) == ""
    assert command.err.startswith("slipstream journal: error: ")
    assert flag in command.err
    assert command.err.endswith(f"see slipstream journal {arguments[0]} --help\n")
    assert command.err.count("\n") == 1


def test_the_command_knows_every_verdict() -> None:
    assert get_args(Verdict) == VERDICTS


def test_a_bug_ends_with_its_traceback_and_code(
    journal: Journal, command: Command, monkeypatch: pytest.MonkeyPatch, stubs_are_slipstream: None
) -> None:
    monkeypatch.setattr("slipstream.journal.stats.collect", lambda reader: dict[str, int]()["a bug"])
    command("stats", code=ExitCode.BUG)
    assert command.err.startswith("Traceback (most recent call last)")
    assert command.err.endswith("slipstream journal: this is a bug; please report it with its traceback\n")


@pytest.mark.long
def test_looking_at_rows_imports_nothing_heavy(journal: Journal) -> None:
    program = (
        "import sys\nfrom slipstream.cli import run\n"
        f"for arguments in (['--run', '{journal.path}', 'list'], ['--run', '{journal.path}', 'stats'], ['list', '--help']):\n"
        "    code = run(['journal', *arguments])\n"
        "heavy = ('torch', 'transformers', 'pyarrow', 'numpy', 'datasets', 'trl', 'vllm')\n"
        "print([name for name in heavy if name in sys.modules], code or 0, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert shown.stderr == "[] 0\n"


@pytest.mark.long
def test_output_that_nobody_reads_to_its_end(journal: Journal) -> None:
    journal.append(entry(number, frame=b"x") for number in range(11, 5000))
    command = f"{sys.executable} -m slipstream journal --run {journal.path} list --limit 0"
    shown = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (shown.returncode, shown.stderr) == (ExitCode.OK, "")
    assert shown.stdout.split()[0] == "group"


def test_a_name_that_the_system_refuses(command: Command) -> None:
    too_long = "a" * 300
    command.run_dir = Path(too_long)
    command("stats", code=ExitCode.CONFIG)
    assert command.err == f"slipstream journal: error: {too_long}: File name too long\n"
