"""Temporary folders: removed in the end, and after a kill by the next process."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from protocol.runtime.scratch import scratch_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def leave(tmp_path: Path, name: str) -> Path:
    """As a killed process leaves it."""
    folder = tmp_path / name
    (folder / "v1").mkdir(parents=True)
    (folder / "v1" / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def test_it_goes_with_its_content(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        (folder / "v1").mkdir()
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_and_nothing_else(tmp_path: Path) -> None:
    left = leave(tmp_path, "slipstream-scratch-killed")
    others = [leave(tmp_path, name) for name in ("something-else", "slipstream-run")]
    (tmp_path / "slipstream-scratch-link").symlink_to(others[0])
    with scratch_folder():
        assert not left.exists()
        assert all((other / "v1").exists() for other in others)


def test_a_folder_in_use_is_not_touched() -> None:
    with scratch_folder() as first, scratch_folder() as second:
        assert first.exists()
        assert second != first


def test_a_folder_that_was_taken_for_one_that_was_left_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock
    taken: list[str] = []

    def late(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            shutil.rmtree(taken[0])
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with scratch_folder() as folder:
        assert folder.exists()
        assert str(folder) != taken[0]
