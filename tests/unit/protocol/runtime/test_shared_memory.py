"""Files that daemons of one host hand each other: private, bounded, gone in the end; read only if they are what was offered."""

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.runtime import scratch as module
from protocol.runtime.scratch import PREFIX, SharedMemory, UnusableFileError, read_offered, shared_memory

DATA = bytes(range(100))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedMemory]:
    with shared_memory(tmp_path) as made:
        yield made


def offered(memory: SharedMemory) -> Path:
    path = memory.write(memoryview(DATA))
    assert path is not None
    return path


def test_what_was_written_is_read_and_goes_with_its_folder(tmp_path: Path) -> None:
    with shared_memory(tmp_path) as memory:
        first, second = offered(memory), offered(memory)
        assert first.name != second.name
        assert read_offered(str(first), 100, tmp_path) == DATA
        assert [oct(path.stat().st_mode & 0o777) for path in (first, first.parent)] == ["0o600", "0o700"]
    assert list(tmp_path.iterdir()) == []


def test_without_room_or_a_file_system_in_memory_there_is_no_file(
    memory: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, has_room in ((400, True), (399, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert memory.has_room(100) is has_room
        assert (memory.write(memoryview(DATA)) is not None) is has_room
    with shared_memory(tmp_path / "absent") as none:
        assert not none.has_room(0)
        assert none.write(memoryview(DATA)) is None


def test_a_file_that_cannot_be_finished_leaves_nothing(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, flags: int) -> int:
        Path(path).touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "private", full)
    assert memory.write(memoryview(DATA)) is None
    assert memory.folder is not None
    assert list(memory.folder.iterdir()) == []


def test_only_what_was_offered_is_read(memory: SharedMemory, tmp_path: Path) -> None:
    path = offered(memory)
    elsewhere, (link, pipe, folder) = tmp_path / "file", map(path.with_name, ("link", "pipe", "sub"))
    elsewhere.write_bytes(DATA)
    link.symlink_to(path)
    os.mkfifo(pipe)
    folder.mkdir()
    for name, num_bytes, why in (
        (str(path), 99, "it has 100 bytes instead of 99"),
        (str(path) + "x", 100, "No such file"),
        (str(link), 100, "symbolic links"),
        (str(pipe), 100, "not a plain file"),
        (str(folder), 100, "."),
        (str(elsewhere), 100, "no folder of a daemon"),
        (f"{tmp_path}/{PREFIX}a/../file", 100, "no folder of a daemon"),
        ("", 100, "no folder of a daemon"),
        (f"{path.parent}/\0", 100, "null"),
    ):
        with pytest.raises(UnusableFileError, match=why):
            read_offered(name, num_bytes, tmp_path)


class ShortReads(io.FileIO):
    """Reads at most seven bytes at a time, as Linux reads at most 2 GiB."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(7 if size is None or not 0 <= size <= 7 else size)

    def readinto(self, buffer: Any) -> int | None:
        return super().readinto(memoryview(buffer)[:7])


def test_a_file_is_read_whole_however_little_linux_gives_at_a_time(
    memory: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(path: str, mode: str, buffering: int = -1, opener: Any = None) -> Any:
        raw = ShortReads(path, mode, opener=opener)
        return raw if buffering == 0 else io.BufferedReader(raw)

    path = offered(memory)
    monkeypatch.setattr(module, "open", short, raising=False)
    assert read_offered(str(path), 100, tmp_path) == DATA


def test_a_file_of_another_user_is_not_read(
    memory: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = offered(memory)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnusableFileError, match="of this user"):
        read_offered(str(path), 100, tmp_path)
