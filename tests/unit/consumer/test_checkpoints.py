"""A checkpoint counts once its pipeline state stands, and only then."""

import json
from pathlib import Path

import pytest

from consumer.checkpoints import commit, is_committed, latest, prune, starting_point
from protocol.errors import ConfigError


def checkpoint(folder: Path, step: int, *, committed: bool = True) -> Path:
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    (place / "adapter_model.safetensors").write_bytes(b"weights")
    if committed:
        commit(place, {"step": step})
    return place


def test_the_newest_by_number_that_counts(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    newest = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 20, committed=False)
    assert latest(tmp_path) == (newest, {"step": 10})


def test_nothing_to_find(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    checkpoint(tmp_path, 1, committed=False)
    (tmp_path / "checkpoint-best").mkdir()
    commit(tmp_path / "checkpoint-best", {})
    assert latest(tmp_path) is None


def test_a_commit_is_atomic_and_may_be_repeated(tmp_path: Path) -> None:
    place = checkpoint(tmp_path, 1, committed=False)
    (place / "pipeline_state.json.partial").write_text('{"step": ')  # a crash in the middle of writing
    assert not is_committed(place)
    commit(place, {"step": 1})
    commit(place, {"step": 1, "again": True})
    assert is_committed(place)
    assert json.loads((place / "pipeline_state.json").read_text()) == {"step": 1, "again": True}
    assert not (place / "pipeline_state.json.partial").exists()


def test_a_run_is_only_continued_on_request(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "checkpoints", 7)
    with pytest.raises(ConfigError) as caught:
        starting_point(tmp_path / "checkpoints", resume=False)
    assert str(caught.value) == (
        f"run_dir: {tmp_path} already holds a run (checkpoint-7). Go on with it by --resume, or choose another run_dir"
    )
    assert starting_point(tmp_path / "checkpoints", resume=True) == (place, {"step": 7})


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_a_checkpoint_that_counts_starts_from_scratch(tmp_path: Path, resume: bool) -> None:
    checkpoint(tmp_path, 3, committed=False)
    assert starting_point(tmp_path, resume) is None


def test_pruning_keeps_the_newest_that_count(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 12, committed=False)
    prune(tmp_path, 2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-12", "checkpoint-4"]
    prune(tmp_path, 5)
    prune(tmp_path, 1)
    assert latest(tmp_path) == (tmp_path / "checkpoint-10", {"step": 10})
    assert not (tmp_path / "checkpoint-4").exists()
