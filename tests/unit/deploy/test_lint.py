"""Every script and the container file, judged by linters."""

import subprocess
import sys
from pathlib import Path

import pytest

from protocol import __version__
from tests.unit.deploy.scripts import REPOSITORY

CONTAINER = REPOSITORY / "deploy" / "container"


def lint(program: str, *arguments: str | Path) -> str:
    """Return the findings of a linter."""
    command = [Path(sys.executable).parent / program, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60).stdout


@pytest.mark.long
def test_shellcheck_finds_nothing_in_the_scripts(tmp_path: Path) -> None:
    scripts = [file for file in REPOSITORY.glob("deploy/**/*") if file.suffix in (".sh", ".sbatch")]
    assert len(scripts) >= 5
    assert lint("shellcheck", "-x", "-P", "SCRIPTDIR", *scripts) == ""
    (tmp_path / "script.sh").write_text("#!/bin/bash\nrm $1\n")
    assert "SC2086" in lint("shellcheck", tmp_path / "script.sh")


def test_hadolint_finds_nothing_in_the_container_file(tmp_path: Path) -> None:
    assert lint("hadolint", CONTAINER / "Containerfile") == ""
    (tmp_path / "Containerfile").write_text("FROM python\n")
    assert "DL3006" in lint("hadolint", tmp_path / "Containerfile")


def test_the_image_holds_every_package_and_has_the_name_that_manifests_use() -> None:
    kept = (CONTAINER / "Containerfile.dockerignore").read_text().splitlines()
    assert kept[0] == "*"
    no_package = {"tests", "docs", "deploy", "benchmarks", "examples", "campaigns"}
    packages = {file.parent.name for file in REPOSITORY.glob("*/__init__.py")} - no_package
    assert {line[1:] for line in kept if line.startswith("!")} == packages | {"LICENSE", "README.md", "pyproject.toml"}
    assert f"--tag slipstream:{__version__} " in (CONTAINER / "Containerfile").read_text()
