"""A checkpoint appears whole or not at all, wherever the process dies, and what `latest` returns can be resumed from."""

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from consumer.learn import checkpoints
from consumer.learn.checkpoints import (
    Checkpoint,
    clear_leftovers,
    commit,
    committed,
    is_committed,
    kept_adapters,
    latest,
    prune,
    staging,
    starting_point,
)
from protocol.errors import ConfigError
from tests.dying import dies
from tests.unit.replay.builders import memory_folder

CHANGES = ("fsync", "rename", "replace", "unlink", "rmdir")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, without waiting for a disk."""
    with memory_folder() as folder:
        yield folder


WEIGHTS = save({"weights": np.ones(9, np.float32)})


def staged(folder: Path, step: int, weights: bytes = WEIGHTS) -> Path:
    place = staging(folder) / f"checkpoint-{step}"
    (place / "global_step").mkdir(parents=True)
    (place / "adapter_model.safetensors").write_bytes(weights)
    (place / "global_step" / "optimizer.pt").write_text("moments")
    return place


def state(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "run_id": "run", **more}


def checkpoint(folder: Path, step: int) -> Path:
    commit(staged(folder, step), state(step))
    return folder / f"checkpoint-{step}"


def foreign(folder: Path, step: int) -> Path:
    """A checkpoint as transformers alone writes it."""
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_text("weights of somebody")
    return place


def is_whole(found: Checkpoint) -> bool:
    files = {str(file.relative_to(found.folder)) for file in found.folder.rglob("*") if file.is_file()}
    return files == {"adapter_model.safetensors", "global_step/optimizer.pt", "pipeline_state.json"}


def test_those_that_count_are_found_by_number(tmp_path: Path) -> None:
    for step in (5, 10, 9):
        checkpoint(tmp_path, step)
    foreign(tmp_path, 20)
    foreign(tmp_path, 2)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / "pipeline_state.json").write_text("{}")
    assert latest(tmp_path) == (tmp_path / "checkpoint-10", {"step": 10, "run_id": "run"})
    assert [(found.folder.name, found.step) for found in committed(tmp_path)] == [
        ("checkpoint-5", 5),
        ("checkpoint-9", 9),
        ("checkpoint-10", 10),
    ]
    found = latest(tmp_path)
    assert found is not None
    assert (found.step, found.run_id) == (10, "run")


def test_nothing_to_find(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    assert committed(tmp_path / "absent") == []
    foreign(tmp_path, 1)
    assert latest(tmp_path) is None


def test_a_crash_anywhere_in_a_commit_leaves_the_old_state_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path
    steps = []

    def attempt() -> None:
        commit(place, state(2))

    for number in itertools.count():
        folder = tmp_path / str(number)
        checkpoint(folder, 1)
        place = staged(folder, 2)
        if not dies(attempt, number, CHANGES, monkeypatch):
            break
        found = latest(folder)
        assert found is not None
        assert is_whole(found)
        steps.append(found.step)
        clear_leftovers(folder)  # as the next process does
        assert is_whole(Checkpoint(checkpoint(folder, 2), {}))
    assert steps == [1] * 6 + [2], "three files and two folders to bring to the disk, the rename, the folder above"


def test_a_crash_anywhere_in_a_commit_of_the_same_step_leaves_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)

    def again() -> None:
        clear_leftovers(tmp_path)
        commit(staged(tmp_path, 2, b"the same weights"), state(2, again=True))

    number = 0
    while dies(again, number, CHANGES, monkeypatch):
        number += 1
        found = latest(tmp_path)
        assert found is not None
        assert (found.step, is_whole(found)) == (2, True)
    assert latest(tmp_path) == (tmp_path / "checkpoint-2", {"step": 2, "run_id": "run"})
    assert list(staging(tmp_path).iterdir()) == []
    assert number > 6


# Where a run starts.


@pytest.mark.parametrize("has_groups", [False, True])
def test_a_run_with_a_checkpoint_is_only_continued_on_request(tmp_path: Path, has_groups: bool) -> None:
    place = checkpoint(tmp_path / "checkpoints", 7)
    with pytest.raises(ConfigError, match=r"^run_dir: .*checkpoint-7.*--resume"):
        starting_point(tmp_path, tmp_path / "checkpoints", has_groups=has_groups, resume=False)
    found = starting_point(tmp_path, tmp_path / "checkpoints", has_groups=has_groups, resume=True)
    assert found == (place, {"step": 7, "run_id": "run"})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_model.safetensors", WEIGHTS[:-1]),
        ("optimizer.pt", b"PK\3\4" + 100 * b"0"),
        ("trainer_state.json", b"{"),
        ("pipeline_state.json", b"{"),
    ],
)
def test_a_checkpoint_that_was_damaged_is_named_with_the_way_back(tmp_path: Path, name: str, content: bytes) -> None:
    checkpoint(tmp_path, 3)
    (checkpoint(tmp_path, 4) / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        starting_point(tmp_path, tmp_path, has_groups=True, resume=True)
    assert str(caught.value).startswith(f"run_dir: {tmp_path}/checkpoint-4/{name} ")
    assert str(caught.value).endswith(
        f"; move {tmp_path}/checkpoint-4 out of the run to go on from the checkpoint before it"
    )


def test_a_run_with_nothing_but_groups_in_its_journal_is_only_continued_on_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"already holds a run \(groups in its journal\)\. Go on with it by --resume"):
        starting_point(tmp_path, tmp_path / "checkpoints", has_groups=True, resume=False)
    assert starting_point(tmp_path, tmp_path / "checkpoints", has_groups=True, resume=True) is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_anything_that_counts_starts_from_scratch(tmp_path: Path, resume: bool) -> None:
    staged(tmp_path, 3)
    assert starting_point(tmp_path, tmp_path, has_groups=False, resume=resume) is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_checkpoint_of_somebody_else_is_refused_and_left(tmp_path: Path, resume: bool) -> None:
    place = foreign(tmp_path, 500)
    clear_leftovers(tmp_path)
    with pytest.raises(ConfigError, match=r"^run_dir: .*checkpoint-500 .* Move it") as caught:
        starting_point(tmp_path, tmp_path, has_groups=False, resume=resume)
    assert caught.value.exit_code == 78
    checkpoint(tmp_path, 400)
    checkpoint(tmp_path, 600)
    prune(tmp_path, 1)
    with pytest.raises(ConfigError, match="checkpoint-500"):  # it may also have come while the run was under way
        checkpoint(tmp_path, 500)
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == ["checkpoint-500", "checkpoint-600"]
    assert [file.name for file in place.iterdir()] == ["model.safetensors"]


def test_checkpoints_of_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    commit(staged(tmp_path, 2), state(2, run_id="another"))
    with pytest.raises(ConfigError, match=r"checkpoint-2 belongs to another run than .*checkpoint-4; move"):
        starting_point(tmp_path, tmp_path, has_groups=True, resume=True)


# Deleting old ones.


def test_pruning_keeps_the_newest_that_count(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        checkpoint(tmp_path, step)
    prune(tmp_path, 2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-4"]
    prune(tmp_path, 5)
    prune(tmp_path, 1)
    found = latest(tmp_path)
    assert found is not None
    assert (found.step, is_whole(found)) == (10, True)
    assert not (tmp_path / "checkpoint-4").exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_the_adapter_of_a_deleted_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def refuse(*places: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    folder = tmp_path / "checkpoints"

    def kept(keep_adapters: int) -> dict[int, list[str]]:
        prune(folder, 1, keep_adapters)
        return {
            step: sorted(file.name for file in place.iterdir())
            for step, place in sorted(kept_adapters(tmp_path).items())
        }

    (checkpoint(folder, 2) / "adapter_config.json").write_text("{}")
    checkpoint(folder, 10)
    (checkpoint(folder, 12) / "adapter_model.safetensors").unlink()  # as of whole weights
    checkpoint(folder, 14)
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert kept(3) == {2: files, 10: files[1:]}
    checkpoint(folder, 16)
    assert kept(2) == {10: files[1:], 14: files[1:]}
    assert kept(0) == {}
    assert [found.step for found in committed(folder)] == [16]


def test_one_that_is_pruned_while_another_process_lists_them_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prune_behind(folder: Path) -> bool:
        monkeypatch.undo()
        was_committed = is_committed(folder)
        prune(tmp_path, 1)
        return was_committed

    for step in (1, 2):
        checkpoint(tmp_path, step)
    monkeypatch.setattr(checkpoints, "is_committed", prune_behind)
    assert latest(tmp_path) == (tmp_path / "checkpoint-2", {"step": 2, "run_id": "run"})


def test_a_crash_anywhere_in_pruning_leaves_only_whole_checkpoints_that_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    number = 0
    while dies(lambda: prune(tmp_path, 1), number, CHANGES, monkeypatch):
        number += 1
        assert all(map(is_whole, committed(tmp_path)))
        assert committed(tmp_path)
        clear_leftovers(tmp_path)  # as the next process does
        assert sorted(tmp_path.iterdir()) == sorted(found.folder for found in committed(tmp_path))
        assert starting_point(tmp_path, tmp_path, has_groups=True, resume=True) == committed(tmp_path)[-1]
        for step in (1, 2):  # put back what the last attempt deleted
            if not is_committed(tmp_path / f"checkpoint-{step}"):
                checkpoint(tmp_path, step)
        clear_leftovers(tmp_path)
    assert [found.step for found in committed(tmp_path)] == [3]
    assert number == 2 + 1 + 2 * 5 + 1, "two renames, the folder above, of each three files and two folders, .deleted"
