"""What demos and benchmarks delete before they begin: folders of their own alone."""

from pathlib import Path

import pytest

from examples.folders import build_once, fresh_folder
from protocol.channel.channel import ipc_lock


def test_a_folder_of_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    fresh_folder(folder)
    (folder / "journal.sqlite").touch()
    fresh_folder(folder)
    assert not (folder / "journal.sqlite").exists()


def test_a_folder_of_somebody_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    with pytest.raises(SystemExit, match="is not replaced"):
        fresh_folder(tmp_path)
    assert (tmp_path / "weights").exists()


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    fresh_folder(tmp_path)
    fresh_folder(tmp_path)


def test_a_link_to_a_demo_is_refused_and_its_target_kept(tmp_path: Path) -> None:
    fresh_folder(tmp_path / "demo")
    (tmp_path / "link").symlink_to("demo")
    with pytest.raises(SystemExit, match="link is not a folder"):
        fresh_folder(tmp_path / "link")
    assert (tmp_path / "demo").is_dir()


def test_a_demo_that_still_runs_is_kept(tmp_path: Path) -> None:
    fresh_folder(tmp_path / "demo")
    (tmp_path / "demo" / "journal.sqlite").touch()
    with ipc_lock(f"ipc://{tmp_path}/demo/control.ipc"), pytest.raises(SystemExit):
        fresh_folder(tmp_path / "demo")
    assert (tmp_path / "demo" / "journal.sqlite").exists()


def test_a_base_model_is_built_once_and_again_with_another_recipe(tmp_path: Path) -> None:
    built: list[bytes] = []
    for recipe in (b"1", b"1", b"2"):
        build_once(tmp_path / "base", recipe, lambda partial, recipe=recipe: (built.append(recipe), partial.mkdir()))
    assert built == [b"1", b"2"]


def test_a_base_model_does_not_replace_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(SystemExit, match="not built here"):
        build_once(tmp_path / "base", b"1", lambda partial: partial.mkdir())
    assert (tmp_path / "base").is_dir()
