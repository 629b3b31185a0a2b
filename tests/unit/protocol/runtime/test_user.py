"""Users without a name, a home, or a place that can be written, as processes, because libraries read the environment once."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from protocol.runtime import user

REPOSITORY = Path(__file__).parents[4]
UNWRITABLE = "/proc/nobody"  # where root cannot make a folder either
SHOWN = (
    "HOME",
    "XDG_CACHE_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "VLLM_CACHE_ROOT",
)
PROGRAM = f"""
import getpass, json, os, pwd, sys, tempfile
from pathlib import Path
from protocol.command_line import exit_code

def nobody(uid):
    raise KeyError(uid)

def work():
    (Path.home() / ".cache").mkdir(parents=True, exist_ok=True)
    values = {{name: os.environ.get(name) for name in {SHOWN}}}
    print(json.dumps(values | {{"user": getpass.getuser(), "temporary": tempfile.gettempdir()}}))
    return 0

pwd.getpwuid = nobody
sys.exit(exit_code("rl-producer", work))
"""


def settled(temporary: Path, **environment: str) -> dict[str, str | None]:
    keep = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PROGRAM]
    shown = subprocess.run(command, env=keep | environment, cwd="/", capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    values: dict[str, str | None] = json.loads(shown.stdout)
    return values


@pytest.mark.long
def test_a_user_without_name_and_home_has_both(short_dir: Path) -> None:
    for given in ({}, {"HOME": UNWRITABLE}, {"HOME": UNWRITABLE, "XDG_CACHE_HOME": UNWRITABLE, "HF_HOME": UNWRITABLE}):
        found = settled(short_dir, **given)
        place = short_dir / f"slipstream-home-{os.getuid()}"
        assert (found["user"], found["HOME"]) == (f"uid-{os.getuid()}", str(place))
        assert place.stat().st_mode & 0o777 == 0o700
    assert found["XDG_CACHE_HOME"] == str(place / ".cache")
    assert found["HF_DATASETS_CACHE"] == str(place / ".cache" / "huggingface" / "datasets")


@pytest.mark.long
def test_what_can_be_written_stays_as_it_is(short_dir: Path) -> None:
    home = short_dir / "home"
    found = settled(short_dir, HOME=str(home), LOGNAME="me")
    assert found == dict.fromkeys(SHOWN) | {
        "HOME": str(home),
        "user": "me",
        "TMPDIR": str(short_dir),
        "temporary": str(short_dir),
    }


def test_models_in_a_home_that_cannot_be_written_are_found(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of root only a mount would keep a folder."""
    home = short_dir / "home"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    monkeypatch.setattr(user, "_can_be_written", lambda folder: home not in folder.parents)
    monkeypatch.setattr(tempfile, "tempdir", str(short_dir))
    environment = {"HOME": str(home)}
    with mock.patch.dict(os.environ, environment, clear=True):
        user.settle_user()
        settled = dict(os.environ)
    place = short_dir / f"slipstream-home-{os.getuid()}"
    assert settled["HOME"] == str(home)
    assert settled["HF_HUB_CACHE"] == f"{home}/.cache/huggingface/hub"
    assert settled["XDG_CACHE_HOME"] == f"{place}/.cache"


@pytest.mark.long
def test_a_temporary_folder_that_is_not_there_is_no_folder_for_anyone(short_dir: Path) -> None:
    found = settled(short_dir, TMPDIR=UNWRITABLE, HOME=str(short_dir / "home"))
    assert found["TMPDIR"] == found["temporary"] == "/tmp"


@pytest.mark.long
@pytest.mark.parametrize("name", ["my [home]", "$HOME", "50%", "a" * 60])
def test_compilers_and_sockets_get_plain_short_paths_of_the_same_places(short_dir: Path, name: str) -> None:
    odd = short_dir / name
    odd.mkdir()
    found = settled(short_dir, TMPDIR=str(odd), HOME=str(odd))
    assert found["TMPDIR"] == found["temporary"]
    assert re.fullmatch(r"[\w/.-]{1,60}", str(found["TMPDIR"]))
    assert Path(str(found["TMPDIR"])).resolve() == odd.resolve()
    caches = Path(str(found["VLLM_CACHE_ROOT"] or odd / ".cache" / "vllm"))
    assert re.fullmatch(r"[\w/.-]+", str(caches))
    assert caches.resolve() == (odd / ".cache" / "vllm").resolve()
