"""The files of a run: whole, torn, rotated, of this release and the one before, or not there."""

import json
import os
import socket
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from protocol.errors import JournalError
from replay.journal.writer import Journal
from slipstream.run_reader import EVALUATIONS, ROLLOUTS, STEPS, DaemonAddress, Ended, RunReader


@pytest.fixture
def run(tmp_path: Path) -> RunReader:
    return RunReader(tmp_path)


def test_a_run_without_files_has_no_lines_and_no_journal(run: RunReader) -> None:
    assert (
        run.lines(STEPS)
        == run.newest_steps(100)
        == run.lines(ROLLOUTS)
        == run.lines(EVALUATIONS)
        == run.timelines()
        == []
    )
    assert list(run.daemons()) == []
    with pytest.raises(JournalError, match="no such file"):
        run.journal()


def test_lines_of_either_release_are_read_and_torn_or_strange_ones_left_out(run: RunReader) -> None:
    nested = "[" * 2_000
    (run.folder / "steps.1.jsonl").write_text(f'{nested}\n{{"step": 1, "loss": NaN}}\n')
    (run.folder / "steps.jsonl").write_text('{"step": 2, "loss": null}\nno JSON\n[3]\n{"step": 3, "lo')
    both = [{"step": 1, "loss": None}, {"step": 2, "loss": None}]
    assert run.lines(STEPS) == run.newest_steps(10_000) == both
    assert run.newest_steps(60) == both[1:], "however long the file is"


def test_how_a_run_ended_is_known_until_it_takes_another_step(run: RunReader) -> None:
    assert run.ended() is None
    (run.folder / "trainer.json").write_text('{"finished": true, "steps": 3}')
    os.utime(run.folder / "trainer.json", (1e9, 1e9))
    assert run.ended() == Ended(3, True, 1e9)
    (run.folder / "steps.jsonl").write_text('{"step": 2}\n{"step": 3}\n{"step": "x"}\n')
    assert run.ended() == Ended(3, True, 1e9)
    (run.folder / "steps.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    assert run.ended() is None, "it went on, and nobody knows how that ended"
    (run.folder / "trainer.json").write_text('{"finished": false, "steps": 4}')
    assert (found := run.ended()) is not None
    assert found.text == "stopped at step 4"
    (run.folder / "trainer.json").write_text('{"finished": true, "steps": 4, "dead_rewards": {"f": 8}}')
    assert (found := run.ended()) is not None
    assert found.dead_rewards == {"f": 8}
    strange = '{"finished": true, "steps": 4, "dead_rewards": [1]}'
    for damaged in ("", "[]", strange, '{"finished": true}', '{"finished": true, "steps": "many"}'):
        (run.folder / "trainer.json").write_text(damaged)
        assert run.ended() is None


def test_each_producer_has_a_timeline(run: RunReader) -> None:
    for name in ("producer-a", "producer-b", "producer-b.1", "rollouts", "evaluations"):
        (run.folder / f"{name}.jsonl").write_text(f'{{"of": "{name}"}}\n')
    assert [[line["of"] for line in lines] for lines in run.timelines()] == [
        ["producer-a"], ["producer-b.1", "producer-b"]
    ]  # fmt: skip
    assert (run.lines(ROLLOUTS), run.lines(EVALUATIONS)) == ([{"of": "rollouts"}], [{"of": "evaluations"}])


def test_a_journal_file_stands_for_its_run(run: RunReader) -> None:
    file = run.folder / "journal.sqlite"
    with closing(Journal(file)):
        for place in (run.folder, file):
            with closing(RunReader(place).journal()) as journal:
                assert (journal.path, RunReader(place).folder) == (file, run.folder)


def test_a_daemon_that_was_killed_is_known_by_the_file_that_it_left(run: RunReader) -> None:
    dead = next(pid for pid in range(4_000_000, 4_100_000) if not psutil.pid_exists(pid))
    folder = run.folder / "metrics"
    folder.mkdir()
    here = socket.gethostname()
    for name, pid, host in (("alive", os.getpid(), here), ("elsewhere", dead, f"not-{here}"), ("killed", dead, here)):
        labels = {"host": host, "daemon": name, "job": "rl-producer", "pid": str(pid)}
        (folder / f"rl-producer-{name}.json").write_text(json.dumps([{"targets": ["h:1"], "labels": labels}]))
    (folder / "torn.json").write_text('[{"targets": [')
    (folder / "odd.json").write_text("[3]")
    assert list(run.daemons()) == [
        DaemonAddress("h:1", "rl-producer", "alive"),
        DaemonAddress("h:1", "rl-producer", "elsewhere"),
        DaemonAddress("h:1", "rl-producer", "killed", process_gone=True),
    ]
