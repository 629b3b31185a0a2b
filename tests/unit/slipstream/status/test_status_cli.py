"""The command: arguments, exit codes, JSON, the live view."""

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from docs.generate_metrics import trainer_registry
from protocol import exposition
from protocol.errors import ExitCode
from protocol.exposition import Targets
from protocol.runtime.health import Health, Notifier
from protocol.runtime.signals import StopFlag
from replay.journal.reader import JournalReader
from replay.journal.writer import Journal
from slipstream.cli import run as slipstream
from slipstream.journal.backup import backup
from slipstream.status import watch as watch_module
from slipstream.status.reading import ProducerView, TrainerView
from slipstream.status.warnings import RULES
from slipstream.status.watch import Watch
from tests.unit.slipstream.status.builders import answer

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a run whose trainer answers."""
    folder = tmp_path_factory.mktemp("run")
    health = Health(60.0, Notifier(None))
    names = {"key": "k", "job": "rl-trainer", "name": "host-1", "folder": folder / "metrics"}
    (folder / "steps.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": NaN}\n{"step": 3, "rew')
    with exposition.serve(trainer_registry(), health, Targets("run"), "127.0.0.1", 0, **names):
        yield folder


def section() -> str:
    """Of docs/monitoring.md."""
    return (
        (REPOSITORY / "docs" / "monitoring.md")
        .read_text()
        .partition("\n## slipstream status\n")[2]
        .partition("\n## ")[0]
    )


def test_one_view_for_people(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slipstream(["status", "--run", str(run_dir), "--once"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "run RUN · release" in out
    assert "the trainer is not ready (starting): wait" in out
    assert "0.500  steps 1-1" in out


def test_one_object_for_programs_has_every_documented_key(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slipstream(["status", "--run", str(run_dir), "--once", "--json", "--every", "0.1"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    for shown, kind in ((found["trainer"], TrainerView), (found["producers"][0], ProducerView)):
        assert shown.keys() == {field.name for field in msgspec.structs.fields(kind)}
    assert found["rewards"] == [{"step": 1, "reward": 0.5}]
    assert found["warnings"][0].keys() == {"name", "text", "cure"}
    page = section()
    for key in {*found, *found["trainer"], *found["producers"][0]}:
        assert f"`{key}`" in page, key


def test_every_warning_is_documented() -> None:
    page = section()
    for name in RULES:
        assert f"`{name}`" in page, name


def test_nothing_that_answers_has_an_exit_code_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics").mkdir()
    assert slipstream(["status", "--run", str(tmp_path), "--once", "--json"]) == ExitCode.NO_ANSWER == 68
    found = json.loads(capsys.readouterr().out)
    assert (found["trainer"], found["producers"], found["answers"]) == (None, [], False)
    assert [warning["name"] for warning in found["warnings"]] == ["nothing_answers"]


@pytest.mark.parametrize(("summary", "says"), [(True, "finished at step 2"), (False, "no daemon of this run answers")])
def test_a_copy_of_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], summary: bool, says: str) -> None:
    """Which has no `metrics`."""
    with (
        closing(Journal(tmp_path / "run" / "journal.sqlite")),
        closing(JournalReader(tmp_path / "run" / "journal.sqlite")) as run,
    ):
        (tmp_path / "run" / "steps.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.75}\n')
        if summary:
            (tmp_path / "run" / "trainer.json").write_text('{"steps": 2, "finished": true}')
        backup(run, tmp_path / "copy")
    for place in (tmp_path / "copy", tmp_path / "copy" / "journal.sqlite"):
        capsys.readouterr()
        code = slipstream(["status", "--run", str(place), "--once"])
        assert code == (ExitCode.OK if summary else ExitCode.NO_ANSWER), (
            "a finished run has no daemon that could answer"
        )
        out = capsys.readouterr().out
        assert says in out
        assert "0.750  steps 1-2" in out


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slipstream(["status", "--run", str(tmp_path), "--once"]) == ExitCode.CONFIG
    assert "no daemon has worked there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json"],
        ["--once", "--every", "0"],
        ["--once", "--every", "nan"],
        ["--url", "host"],
        ["--url", "host:99999"],
        ["--url", "user@host:1"],
        ["--run", "a", "--config", "b"],
    ],
)
def test_usage_errors_are_one_line_and_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert slipstream(["status", *arguments]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_an_address_is_enough(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (run_dir / "metrics").glob("*.json")
    address = json.loads(file.read_text())[0]["targets"][0]
    assert slipstream(["status", "--url", f"http://{address}/metrics", "--once", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["trainer"]["address"], found["trainer"]["run"]) == (address, "RUN")
    assert found["rewards"] == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_ctrl_c_leaves_the_live_view_with_0(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    naps, sleep = iter([0.5]), StopFlag.sleep

    def nap(stop: StopFlag, seconds: float) -> None:
        if next(naps, None) != seconds:
            signal.raise_signal(signal.SIGINT)
            sleep(stop, seconds)

    monkeypatch.setattr(StopFlag, "sleep", nap)
    monkeypatch.setattr("rich.console.Console", lambda: Console(force_terminal=is_terminal, width=80, height=60))
    assert slipstream(["status", "--run", str(run_dir), "--every", "0.5"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.count("slipstream status") >= 2
    assert ("\x1b[" in out) is is_terminal


def test_without_the_file_the_line_of_rewards_is_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a trainer that went on from an earlier checkpoint."""
    answers = iter([[answer(step=step, reward=reward)] for step, reward in ((4, 0.25), (5, 0.5), (4, 0.75))])
    monkeypatch.setattr(watch_module, "ask", lambda _: next(answers))
    watch = Watch(None, [])
    assert [watch.look().rewards for _ in range(3)] == [{4: 0.25}, {4: 0.25, 5: 0.5}, {4: 0.75}]
