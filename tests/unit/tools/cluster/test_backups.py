"""Copies of a run that its manager makes."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.cluster.fleet.backups import back_up


def test_the_newest_two_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["20261123-101010", "20261123-102010", "20261124-101010"])
    monkeypatch.setattr("time.strftime", lambda form: next(names))

    def copied(command: list[str], **options: object) -> SimpleNamespace:
        assert command[-5:-1] == ["--run", "/runs/a", "backup", "--to"]
        Path(command[-1]).mkdir()
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", copied)
    said = [back_up("/runs/a", str(tmp_path / "there")) for _ in range(3)]
    assert said[2] == f"backup in {tmp_path}/there/backup-20261124-101010"
    kept = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert kept == ["backup-20261123-102010", "backup-20261124-101010"]


def test_a_failure_is_said_and_nothing_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "there/backup-1").mkdir(parents=True)
    (tmp_path / "there/backup-2").mkdir()
    assert "no backup: rl-journal: error: " in back_up(str(tmp_path / "gone"), str(tmp_path / "there"))
    assert len(list((tmp_path / "there").iterdir())) == 2
    (tmp_path / "file").touch()
    assert "no backup in" in back_up(str(tmp_path), str(tmp_path / "file/there"))
