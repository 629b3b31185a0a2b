"""Copies of a run that its manager makes."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from replay.journal.writer import Journal
from slipstream_extras.ray.backups import back_up
from slipstream_extras.ray.plan import namespace

TIMES = ["20261123-101010", "20261123-102010", "20261124-101010"]


def run(folder: Path, run_id: str) -> str:
    with closing(Journal(folder / "journal.sqlite")) as journal:
        journal.note_facts({"run_id": run_id})
    return str(folder)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes copies as `slipstream journal backup` does, without a process for each, at the next of `TIMES`."""
    times = iter(TIMES * 2)
    monkeypatch.setattr("time.strftime", lambda form: next(times))

    def copied(command: list[str], **options: object) -> object:
        run_dir, place = Path(command[command.index("--run") + 1]), Path(command[command.index("--to") + 1])
        place.mkdir()
        shutil.copy(run_dir / "journal.sqlite", place)
        return type("Made", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr("subprocess.run", copied)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("in_process")
def test_the_newest_two_copies_of_a_run_stay(tmp_path: Path) -> None:
    run_dir, place = run(tmp_path / "run", "a"), tmp_path / "there"
    said = [back_up(run_dir, str(place)) for _ in TIMES]
    kept = names(place / namespace(run_dir))
    assert [name.rpartition("-")[0] for name in kept] == [f"backup-{time}" for time in TIMES[1:]]
    assert said[2] == f"backup in {place / namespace(run_dir) / kept[1]}"


@pytest.mark.usefixtures("in_process")
def test_runs_that_share_a_folder_keep_two_copies_each(tmp_path: Path) -> None:
    runs = [run(tmp_path / part / "run", part) for part in ("math", "code")]
    for run_dir in runs:
        for _ in TIMES:
            back_up(run_dir, str(tmp_path / "there"))
    assert [len(names(tmp_path / "there" / namespace(run_dir))) for run_dir in runs] == [2, 2]


@pytest.mark.usefixtures("in_process")
def test_what_is_no_copy_of_this_run_stays(tmp_path: Path) -> None:
    run_dir, place = run(tmp_path / "run", "a"), tmp_path / "there"
    own = place / namespace(run_dir)
    for folder in (place, own):
        (folder / "backup-2024-photos").mkdir(parents=True)
        (folder / "backup-20200101-000000-1").mkdir()
        (folder / "backup-0.tar").touch()
        (folder / "backup-20200101-000000-2").touch()
    run(own / "backup-20200101-000000-3", "an earlier run of this folder")
    (own / "backup-20200101-000000-4").symlink_to(run_dir)
    before = names(place), names(own)
    said = [back_up(run_dir, str(place)) for _ in TIMES]
    assert all(line.startswith("backup in ") for line in said)
    assert set(before[0]) <= set(names(place))
    assert set(before[1]) <= set(names(own))
    assert len(names(own)) == len(before[1]) + 2


@pytest.mark.usefixtures("in_process")
def test_a_copy_that_cannot_be_deleted_is_no_failed_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(f"no: {path}")

    monkeypatch.setattr("shutil.rmtree", refuse)
    run_dir = run(tmp_path / "run", "a")
    said = [back_up(run_dir, str(tmp_path / "there")) for _ in TIMES]
    assert said[2].startswith("backup in ")
    assert "older copies stay: no: " in said[2]


@pytest.mark.long
def test_a_failure_is_said_and_nothing_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "there/backup-1").mkdir(parents=True)
    assert "no backup: slipstream journal: error: " in back_up(str(tmp_path / "gone"), str(tmp_path / "there"))
    assert "backup-1" in names(tmp_path / "there")
    (tmp_path / "file").touch()
    assert "no backup in" in back_up(str(tmp_path), str(tmp_path / "file/there"))
