"""Who sees whom on a GPU. A lock is that of an open file, so that two tenancies of one process are as those of two."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from protocol.errors import StalledError
from protocol.gpu import reservation as tenants
from protocol.gpu.reservation import OtherDaemon, tenancy


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "ROOT", tmp_path)


def test_the_second_one_sees_the_first(tmp_path: Path) -> None:
    with tenancy("GPU-1", "trainer", "runs/a") as first:
        with tenancy("GPU-1", "producer", "runs/b") as second:
            assert (first.neighbours, second.neighbours) == ([], [OtherDaemon("trainer", "runs/a")])
        with (
            tenancy("GPU-1", "producer", "runs/c") as third,
            tenancy("GPU-2", "producer", "") as other,
        ):
            assert (third.neighbours, other.neighbours) == ([OtherDaemon("trainer", "runs/a")], [])
    assert list(tmp_path.iterdir()) == []


def test_of_two_with_one_role_others_see_the_first() -> None:
    first, second, third = (tenancy("GPU-1", "producer", name) for name in "abc")
    with first:
        with second as seen:
            assert seen.neighbours == [OtherDaemon("producer", "a")]
        with third as seen:
            assert seen.neighbours == [OtherDaemon("producer", "a")]
    with tenancy("GPU-1", "trainer", "d") as seen:
        assert seen.neighbours == []


def test_a_child_that_has_inherited_the_lock_keeps_nothing() -> None:
    reading, writing = os.pipe()
    with tenancy("GPU-1", "trainer", "a") as own, own.alone(1.0, lambda: False, list):
        if (child := os.fork()) == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with tenancy("GPU-1", "producer", "b") as other, other.alone(0.0, lambda: False, pytest.fail):
            assert other.neighbours == []
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_one_at_a_time_changes_how_much_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with tenancy("GPU-1", "trainer", "a") as one, tenancy("GPU-1", "producer", "b") as other:
        with one.alone(0.0, lambda: False, pytest.fail):
            late = other.alone(0.0, lambda: False, lambda: said.append("waits"))
            with pytest.raises(StalledError, match=r"has not finished its start within .*=0 s"), late:
                pass
            with other.alone(9.0, lambda: True, lambda: said.append("waits")):  # a stop was asked for
                pass
        assert said == ["waits"]
        with one.alone(0.0, lambda: False, pytest.fail):
            # It ends while the other one waits.
            def end(_: float) -> None:
                fcntl.flock(descriptor_of(tmp_path, "GPU-1.memory"), fcntl.LOCK_UN)

            monkeypatch.setattr(time, "sleep", end)
            with other.alone(9.0, lambda: False, lambda: said.append("waits")):
                assert said == ["waits", "waits"]


def descriptor_of(root: Path, name: str) -> int:
    """That of this process which is open for this file."""
    [file] = root.glob(f"*/{name}")
    numbers = [int(entry) for entry in os.listdir("/proc/self/fd")]
    return next(number for number in numbers if os.path.realpath(f"/proc/self/fd/{number}") == str(file.resolve()))


def test_without_memory_for_files_nobody_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "ROOT", tmp_path / "nowhere")
    with tenancy("GPU-1", "trainer", "a"), tenancy("GPU-1", "producer", "b") as other:
        assert other.neighbours == []
        with other.alone(0.0, lambda: False, pytest.fail):
            pass
