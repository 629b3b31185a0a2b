"""What is staged appears whole and on the disk, wherever the process dies, and what was there before stays until then."""

import itertools
import os
from pathlib import Path

import pytest

from protocol.runtime.files import restore_folder, staged
from tests.dying import dies

CHANGES = ("fsync", "rename", "unlink", "rmdir", "mkdir")
NEW = {"weights": "new", "more/state": "new"}
OLD = {"weights": "old", "gone": "old"}


def write(folder: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(place: Path) -> dict[str, str] | str | None:
    if place.is_dir():
        return {str(file.relative_to(place)): file.read_text() for file in place.rglob("*") if file.is_file()}
    return place.read_text() if place.exists() else None


def replace(final: Path) -> None:
    with staged(final) as partial:
        write(partial, NEW)


def replace_file(final: Path) -> None:
    with staged(final) as partial:
        partial.write_text("new")


@pytest.mark.parametrize("had_one", [False, True])
def test_a_crash_anywhere_leaves_the_old_folder_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_one: bool
) -> None:
    found = []
    for number in itertools.count():
        final = tmp_path / str(number) / "adapter"
        final.parent.mkdir()
        if had_one:
            write(final, OLD)
        if not dies(lambda final=final: replace(final), number, CHANGES, monkeypatch):
            break
        restore_folder(final)
        found.append(content(final))
        replace(final)
        assert content(final) == NEW
        assert list(final.parent.iterdir()) == [final], "nothing of the crash is left"
    before = OLD if had_one else None
    assert [one for one in found if one not in (before, NEW)] == []
    assert [before in found, NEW in found] == [True, True]
    assert content(final) == NEW


def test_a_crash_anywhere_leaves_the_old_file_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, number = tmp_path / "trainer.json", 0
    final.write_text("old")
    while dies(lambda: replace_file(final), number, CHANGES, monkeypatch):
        assert content(final) in ("old", "new")
        final.write_text("old")
        number += 1
    assert content(final) == "new"
    assert list(tmp_path.iterdir()) == [final]


@pytest.mark.parametrize("had_one", [False, True])
def test_everything_is_on_the_disk_before_the_name_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_one: bool
) -> None:
    final, events = tmp_path / "adapter", []
    if had_one:
        write(final, OLD)
    fsync, rename = os.fsync, os.rename

    def watched_sync(descriptor: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def watched_rename(source: Path, target: Path) -> None:
        events.append(f"{Path(source).name} -> {Path(target).name}")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", watched_sync)
        patched.setattr(os, "rename", watched_rename)
        replace(final)
    new = ".adapter.partial"
    assert sorted(events[:4]) == sorted([new, f"{new}/weights", f"{new}/more", f"{new}/more/state"])
    assert events[3] == new, "a folder after what is in it"
    assert events[4:] == ["adapter -> .adapter.old"] * had_one + [f"{new} -> adapter", "."]


@pytest.mark.parametrize("had_one", [False, True])
def test_an_error_leaves_what_was_there(tmp_path: Path, had_one: bool) -> None:
    final = tmp_path / "adapter"
    if had_one:
        write(final, OLD)

    def fail() -> None:
        with staged(final) as partial:
            write(partial, NEW)
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert content(final) == (OLD if had_one else None)
    assert list(tmp_path.iterdir()) == [final] * had_one


def test_a_file_takes_the_place_of_no_folder(tmp_path: Path) -> None:
    write(tmp_path / "mine", OLD)
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "mine")
    assert content(tmp_path / "mine") == OLD
