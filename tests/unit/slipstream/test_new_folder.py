"""The folder that a tool makes, where the system refuses it."""

import errno
from pathlib import Path

import pytest

from protocol.errors import ConfigError, DatasetError
from slipstream.new_folder import new_folder


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    begun = []
    for to, why in ((tmp_path / "file" / "new", "Not a directory"), (tmp_path / ("a" * 300), "File name too long")):
        with pytest.raises(ConfigError, match=f"--to {to}: cannot be written: {why}"), new_folder(to):
            begun.append(to)
    assert not begun
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--to {tmp_path}/new: the disk is full"), new_folder(tmp_path / "new"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_about_what_they_are_about(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^/of/a/model: Permission denied$"), new_folder(tmp_path / "new"):
        raise PermissionError(errno.EACCES, "Permission denied", "/of/a/model")
    for error in (DatasetError("no rows"), OSError("no weights"), KeyError("a bug")):
        with pytest.raises(type(error)) as found, new_folder(tmp_path / "new"):
            raise error
        assert found.value is error


def test_the_second_of_two_at_once_is_refused_and_what_a_killed_one_left_is_not(tmp_path: Path) -> None:
    to = tmp_path / "new"
    with new_folder(to) as place:
        (place / "mine").touch()
        with pytest.raises(ConfigError, match=f"--to {to}: another command is making it"), new_folder(to):
            pytest.fail("it must not begin")
    assert [path.name for path in to.iterdir()] == ["mine"]
    (tmp_path / ".other.partial").mkdir()
    (tmp_path / ".other.partial" / "left").touch()
    with new_folder(tmp_path / "other"):
        pass
    assert list((tmp_path / "other").iterdir()) == []
