"""A full disk, told from every other error."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from protocol.runtime.files import ignore_disk_full, out_of_space


def test_only_a_full_disk_is_passed_over() -> None:
    with ignore_disk_full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="Input/output error"), ignore_disk_full():
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_the_disk_is_asked_where_the_error_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("a library could not write")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    assert not out_of_space(error, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20 - 1))
    assert out_of_space(error, tmp_path)
    assert not out_of_space(error)
