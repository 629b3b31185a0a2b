"""Wheel and sdist are whole: installed into an empty environment they have every command, plugin and file of the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from protocol import __version__

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("protocol", "replay", "producer", "consumer", "slipstream", "slipstream_extras")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
_INSPECT = """
import importlib.metadata as metadata, json, protocol, slipstream
found = {group: [point.name for point in metadata.entry_points(group=group) if point.load()] for group in %r}
print(json.dumps({"version": metadata.version("slipstream"), "from": slipstream.__file__, "points": found}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Return what the command writes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def build(source: Path, to: Path, *targets: str) -> list[Path]:
    run(sys.executable, "-m", "hatchling", "build", "-d", to, *targets, cwd=source)
    return sorted(to.iterdir())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What version control has, because builds leave out what it ignores."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(REPOSITORY / name, folder)
    for name in (*PACKAGES, "tests", "examples"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    [archive] = build(checkout, tmp_path_factory.mktemp("sdist"), "-t", "sdist")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of what the sdist has."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    [source] = unpacked.iterdir()
    [built] = build(source, tmp_path_factory.mktemp("wheel"), "-t", "wheel")
    return built


def test_the_wheel_has_the_packages_whole_and_nothing_else(wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"slipstream-{__version__}.dist-info/")}
    files = (file for package in PACKAGES for file in (checkout / package).rglob("*") if file.is_file())
    assert names == {str(file.relative_to(checkout)) for file in files}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_sdist_has_what_its_tests_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "examples/gsm8k/run.yaml", "tests/unit/test_house.py"} <= names


def test_commands_and_plugins_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """Libraries come from the environment of the tests, which is behind the new one on the path."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--disable-pip-version-check", wheel, cwd=tmp_path)
    [site] = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    groups = [*PROJECT["entry-points"]]
    found = json.loads(run(python, "-c", _INSPECT % groups, cwd=tmp_path))
    assert found["version"] == __version__
    assert Path(found["from"]).is_relative_to(environment)
    assert {group: sorted(names) for group, names in found["points"].items()} == {
        group: sorted(points) for group, points in PROJECT["entry-points"].items()
    }
    for command in PROJECT["scripts"]:
        assert "--help" in run(environment / "bin" / command, "--help", cwd=tmp_path)
        assert run(environment / "bin" / command, "--version", cwd=tmp_path) == f"{command} {__version__}\n"
    assert f"slipstream {__version__}\n" in run(environment / "bin" / "slipstream", "env", cwd=tmp_path)
