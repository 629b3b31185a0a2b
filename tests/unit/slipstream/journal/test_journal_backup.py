"""`slipstream journal backup` beside a journal that is being written: whole copies, or none."""

import functools
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from consumer.learn import checkpoints as checkpoints
from protocol.errors import ExitCode, JournalError
from protocol.runtime.files import aside
from replay.journal.reader import JournalReader
from replay.journal.schema import EVERY_GROUP
from replay.journal.writer import Journal
from slipstream.journal import backup as journal_backup
from tests.unit.consumer.evaluate.test_leases import Process
from tests.unit.slipstream.journal.command import Command


def checkpoint(run_dir: Path, step: int) -> Path:
    staged = checkpoints.staging(run_dir / "checkpoints") / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / "adapter.safetensors").write_text(f"weights {step}")
    checkpoints.commit(staged, {"step": step, "run_id": "r"})
    return run_dir / "checkpoints" / f"checkpoint-{step}"


def test_the_copy_holds_every_group_the_newest_checkpoint_and_the_step_lines(
    journal: Journal, command: Command, tmp_path: Path
) -> None:
    checkpoint(command.run_dir, 1)
    checkpoint(command.run_dir, 2)
    (command.run_dir / "steps.jsonl").write_text('{"step": 1}\n')
    to = tmp_path / "copy"
    first, second = command.lines("backup", "--to", str(to))
    assert first.startswith("checkpoint-2 and a journal of ")
    assert f"run_dir={to}" in second
    found = checkpoints.latest(to / "checkpoints")
    assert found is not None
    assert found.state == {"step": 2, "run_id": "r"}
    assert (found.folder / "adapter.safetensors").read_text() == "weights 2"
    assert (to / "steps.jsonl").read_text() == '{"step": 1}\n'
    with closing(JournalReader(to / "journal.sqlite")) as copy, closing(JournalReader(journal.path)) as original:
        assert list(copy.rows(EVERY_GROUP)) == list(original.rows(EVERY_GROUP))
        assert copy.facts() == original.facts()
    with closing(Journal(to / "journal.sqlite")) as again:
        assert again.newest_version == journal.newest_version
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["copy", "run"]


@pytest.mark.parametrize("deleted_while", ["it is copied", "the journal is copied"])
def test_a_checkpoint_that_is_deleted_meanwhile_is_not_used(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted_while: str
) -> None:
    checkpoint(command.run_dir, 1)

    def turn_over(*_: object) -> None:
        if (command.run_dir / "checkpoints" / "checkpoint-1").exists():
            checkpoint(command.run_dir, 2)
            checkpoints.prune(command.run_dir / "checkpoints", 1)

    copy_tree, copy_journal = journal_backup.shutil.copytree, JournalReader.copy_to
    if deleted_while == "it is copied":
        monkeypatch.setattr(journal_backup.shutil, "copytree", lambda *paths: (turn_over(), copy_tree(*paths)))
    else:
        monkeypatch.setattr(JournalReader, "copy_to", lambda reader, to: (copy_journal(reader, to), turn_over())[0])
    assert command.lines("backup", "--to", str(tmp_path / "copy"))[0].startswith("checkpoint-2 ")
    assert [folder.name for folder in (tmp_path / "copy" / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_a_first_checkpoint_that_appears_meanwhile_is_taken(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_journal = JournalReader.copy_to

    def and_a_checkpoint(reader: JournalReader, to: Path) -> None:
        copy_journal(reader, to)
        if not (command.run_dir / "checkpoints").exists():
            checkpoint(command.run_dir, 1)

    monkeypatch.setattr(JournalReader, "copy_to", and_a_checkpoint)
    assert command.lines("backup", "--to", str(tmp_path / "copy"))[0].startswith("checkpoint-1 ")


def test_checkpoints_that_never_last_are_given_up_and_leave_nothing(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(command.run_dir, 1)
    copy_journal, steps = JournalReader.copy_to, iter(range(2, 100))

    def and_turn_over(reader: JournalReader, to: Path) -> None:
        copy_journal(reader, to)
        checkpoint(command.run_dir, next(steps))
        checkpoints.prune(command.run_dir / "checkpoints", 1)

    monkeypatch.setattr(JournalReader, "copy_to", and_turn_over)
    command("backup", "--to", str(tmp_path / "copy"), code=ExitCode.JOURNAL)
    assert "save_total_limit" in command.err
    assert [folder.name for folder in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_exists_is_left_alone(journal: Journal, command: Command, tmp_path: Path) -> None:
    to = tmp_path / "copy"
    to.mkdir()
    (to / "mine").write_text(json.dumps(1))
    command("backup", "--to", str(to), code=ExitCode.JOURNAL)
    assert "exists already" in command.err
    assert [file.name for file in to.iterdir()] == ["mine"]
    command("backup", "--to", "a" * 300, code=ExitCode.JOURNAL)
    assert "cannot be written: File name too long" in command.err


class FullDisk:
    """What SQLite says of one."""

    def __init__(self, *_: object) -> None: ...

    def backup(self, *_: object) -> "FullDisk":
        return self

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def step(self) -> None:
        raise apsw.FullError("not an error")


def test_a_full_disk_is_said(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(JournalReader(journal.path)) as reader, monkeypatch.context() as patched:
        patched.setattr(apsw, "Connection", FullDisk)
        with pytest.raises(JournalError, match=r"cannot be copied there \(the disk is full\)"):
            reader.copy_to(tmp_path / "copy.sqlite")

    def failing(source: Path, to: Path) -> None:
        raise shutil.Error([(str(source / name), str(to / name), "[Errno 28] No space left") for name in "ab"])

    (journal.path.parent / "adapter").mkdir()
    monkeypatch.setattr(shutil, "copytree", failing)
    to = tmp_path / "copy"
    command("backup", "--to", str(to), code=ExitCode.JOURNAL)
    assert command.err.endswith(f"--to {to}: cannot be written: [Errno 28] No space left; choose another place\n")


def evaluations(run_dir: Path, session: str = "s") -> Process:
    """Of a run whose every version is due."""
    return Process(run_dir, session, every_versions=1, first_step=100)


def evaluate(process: Process, version: int, reward: float) -> None:
    process.publish(version)
    process.answer_all(reward)
    process.collect()


def test_the_copy_of_a_run_knows_its_evaluations_and_its_best(
    journal: Journal, command: Command, tmp_path: Path
) -> None:
    process = evaluations(command.run_dir)
    evaluate(process, 1, 0.75)
    evaluate(process, 2, 0.5)
    process.publish(3)  # is due
    for name in ("adapter", "sft"):
        (command.run_dir / name).mkdir()
        (command.run_dir / name / "adapter_model.safetensors").write_text(name)
    for name in ("steps.jsonl", "steps.1.jsonl", "rollouts.jsonl", "trainer.json", "resolved.yaml"):
        (command.run_dir / name).write_text(name)
    to = tmp_path / "copy"
    command("backup", "--to", str(to))
    for place in ("evaluations.jsonl", "evaluation", "held-out", "checkpoints/best", "adapter", "sft", "steps.jsonl",
                  "steps.1.jsonl", "rollouts.jsonl", "trainer.json", "resolved.yaml"):  # fmt: skip
        assert content(to / place) == content(command.run_dir / place), place
    restored = evaluations(to, "t")
    assert (restored.results.versions, restored.due.versions) == ([1, 2], [3])
    assert (restored.results.best or {})["version"] == 1


@pytest.mark.parametrize(
    "at", ["evaluations.jsonl", "version-3-step-30.adapter", "evaluation.json", "adapter_model.safetensors"]
)
@pytest.mark.parametrize("is_better", [False, True])
def test_a_result_that_comes_while_it_is_copied_is_neither_lost_nor_torn(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, is_better: bool
) -> None:
    """At the moment when this file is copied."""
    process = evaluations(command.run_dir)
    evaluate(process, 1, 0.5)
    process.publish(3)
    copy, copy_lines, reward = shutil.copy2, shutil.copyfileobj, 0.75 if is_better else 0.25

    def evaluate_at(name: str) -> None:
        if name == at and 3 in process.due.versions:
            process.answer_all(reward)
            process.collect()

    def copy_and_evaluate(source: Any, target: Any, **options: Any) -> Any:
        evaluate_at(Path(source).name)
        return copy(source, target, **options)

    def copy_lines_and_evaluate(source: Any, target: Any) -> None:
        evaluate_at(Path(source.name).name)
        copy_lines(source, target)

    monkeypatch.setattr(shutil, "copytree", functools.partial(shutil.copytree, copy_function=copy_and_evaluate))
    monkeypatch.setattr(shutil, "copy2", copy_and_evaluate)
    monkeypatch.setattr(shutil, "copyfileobj", copy_lines_and_evaluate)
    to = tmp_path / "copy"
    command("backup", "--to", str(to))
    assert process.due.versions == []
    best = content(to / "checkpoints" / "best")
    assert best["adapter_model.safetensors"] == b"weights of v%d" % best["evaluation.json"]["version"]
    restored = evaluations(to, "t")
    assert 1 in restored.results.versions
    if 3 in restored.due.versions:
        evaluate(restored, 3, reward)
    assert restored.results.versions == [1, 3]
    assert content(to / "checkpoints" / "best") == content(command.run_dir / "checkpoints" / "best")


def test_the_best_is_copied_also_between_the_two_renames_that_replace_it(
    journal: Journal, command: Command, tmp_path: Path
) -> None:
    evaluate(evaluations(command.run_dir), 1, 0.5)
    best = command.run_dir / "checkpoints" / "best"
    best.rename(aside(best))
    command("backup", "--to", str(tmp_path / "copy"))
    assert content(tmp_path / "copy" / "checkpoints" / "best") == content(aside(best))


@pytest.mark.parametrize("torn", [False, True])
def test_the_best_is_copied_again_where_the_first_rename_comes_while_it_is_copied(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    evaluate(evaluations(command.run_dir), 1, 0.5)
    best, copy_tree = command.run_dir / "checkpoints" / "best", shutil.copytree

    def copy_and_rename(source: Path, target: Path) -> None:
        copy_tree(source, target)
        if best.exists():
            best.rename(aside(best))
            if torn:
                raise shutil.Error([(str(source / "a"), str(target / "a"), "[Errno 2] No such file or directory")])

    monkeypatch.setattr(shutil, "copytree", copy_and_rename)
    command("backup", "--to", str(tmp_path / "copy"))
    assert content(tmp_path / "copy" / "checkpoints" / "best") == content(aside(best))


def content(place: Path) -> Any:
    """Of a file, or of every file of a folder but the time of a result."""
    if place.is_dir():
        return {file.name: content(file) for file in place.iterdir()}
    if place.name == "evaluation.json":
        return json.loads(place.read_text()) | {"t": None, "duration_s": None}
    return place.read_bytes()
