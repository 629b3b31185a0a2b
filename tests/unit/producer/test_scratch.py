"""Temporary folders: removed in the end, and after a kill by the next process."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from producer.scratch import scratch_folder

LONG_AGO = time.time() - 3600


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def leave(tmp_path: Path, name: str, age: float = LONG_AGO) -> Path:
    """As a killed process leaves it."""
    folder = tmp_path / name
    (folder / "v1").mkdir(parents=True)
    (folder / "v1" / "adapter_model.safetensors").write_bytes(b"weights")
    os.utime(folder, (age, age))
    return folder


def test_it_goes_with_its_content(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        (folder / "v1").mkdir()
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_and_nothing_else(tmp_path: Path) -> None:
    left = leave(tmp_path, "slipstream-adapters-killed")
    young = leave(tmp_path, "slipstream-adapters-young", time.time())
    other = leave(tmp_path, "something-else")
    (tmp_path / "slipstream-adapters-link").symlink_to(other)
    with scratch_folder():
        assert not left.exists()
        assert young.exists()
        assert (other / "v1").exists()


def test_a_folder_in_use_is_not_touched() -> None:
    with scratch_folder() as first:
        os.utime(first, (LONG_AGO, LONG_AGO))
        with scratch_folder() as second:
            assert first.exists()
            assert second != first
