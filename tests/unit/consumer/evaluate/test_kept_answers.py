"""The texts of evaluations: which are kept, for how long, and that they are what producers sent."""

from pathlib import Path
from typing import Any

import pytest

from consumer.evaluate import evaluation, kept_answers
from consumer.evaluate.kept_answers import NEWEST, KeptAnswer, kept_versions, read_answers
from tests.unit.consumer.evaluate.test_leases import NUM_PROMPTS, Process
from tests.unit.consumer.evaluate.test_results import blob, result, results

ANSWERS = [KeptAnswer(0, 0.5, b"frame"), KeptAnswer(3, None)]


def versions(folder: Path) -> list[int]:
    return list(kept_versions(folder))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = results(tmp_path)
    assert versions(tmp_path) == []
    for version in range(1, NEWEST + 5):
        kept.record(result(version, 0.9 if version == 2 else 0.5), blob(version)[0], ANSWERS)
    newest = list(range(5, NEWEST + 5))
    assert versions(tmp_path) == [2, *newest]
    assert read_answers(kept_versions(tmp_path)[2]) == ANSWERS
    again = results(tmp_path)
    again.record(result(99, 0.1), blob(99)[0], ANSWERS)
    assert versions(tmp_path) == [2, *newest[1:], 99], "the best is known to the next process, too"


def test_steps_that_a_crash_undid_leave_none_and_a_damaged_file_has_none(tmp_path: Path) -> None:
    kept = results(tmp_path)
    for version in (1, 2):
        kept.record(result(version, 0.5), blob(version)[0], ANSWERS)
    (tmp_path / "held-out" / ".version-3-step-30.answers.partial").write_bytes(b"half")
    results(tmp_path, first_step=10)
    assert [file.name for file in (tmp_path / "held-out").iterdir()] == ["version-1-step-10.answers"]
    file = kept_versions(tmp_path)[1]
    file.write_bytes(file.read_bytes()[:-1])
    assert read_answers(file) == read_answers(tmp_path / "gone") == []
    file.write_bytes(b"\x81\xa1a" + b"\x91" * 10_000)
    assert read_answers(file) == []


def test_files_and_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "held-out"
    (folder / "notes").mkdir(parents=True)
    mine = ["version-1.answers", "version-x-step-30.answers", "version-3-step-30.answers.bak", "todo.txt"]
    for name in mine:
        (folder / name).write_text("mine")
    results(tmp_path, first_step=10)
    assert sorted(file.name for file in folder.iterdir()) == sorted([*mine, "notes"])
    assert versions(tmp_path) == []


def test_a_full_disk_costs_the_texts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    kept = results(tmp_path)
    monkeypatch.setattr(kept_answers, "staged", full)
    assert kept.record(result(1, 0.5), blob(1)[0], ANSWERS)
    assert (kept.versions, versions(tmp_path)) == ([1], [])


@pytest.mark.parametrize("room_for", [2, NUM_PROMPTS])
def test_what_producers_answered_is_kept_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_for: int
) -> None:
    sent = []
    process = Process(tmp_path)
    receive = process.leases.receive
    monkeypatch.setattr(
        process.leases, "receive", lambda session, group: (sent.append(group.frame), receive(session, group))[1]
    )
    process.publish(0)
    process.tick()
    process.answer(process.sent.popleft()[1], 1.0)
    monkeypatch.setattr(evaluation, "MAX_BYTES", room_for * len(sent[0]))
    process.answer_all(0.5)
    process.collect()
    found = read_answers(kept_versions(tmp_path)[0])
    assert [one.prompt_id for one in found] == list(range(NUM_PROMPTS))
    frames = [one.frame for one in found if one.frame]
    assert frames == sent[:room_for]
    (unread,) = [one for one in found if one.score is None]  # the row without a prompt
    assert unread.frame == b""
    assert [one.score for one in found if one is not unread] == [1.0, *[0.5] * (NUM_PROMPTS - 2)]
