"""Every script and the container file, judged by linters."""

import subprocess
import sys
from pathlib import Path

import pytest

from protocol import __version__
from tests.unit.slipstream.cluster.render.rendered import project, render

REPOSITORY = Path(__file__).parents[5]
CONTAINER = REPOSITORY / "deploy" / "container"
VARIANTS = [
    ("slurm", "--trainer-node", "n1"),
    ("slurm", "--trainer-node", "n1", "--nodes", "3", "--gpus", "0"),
    ("kubernetes",),
    ("ssh", "--trainer-node", "root@gpu01", "--hosts", "gpu02"),
]


def lint(program: str, *files: Path) -> str:
    """What it says against the files."""
    command = [Path(sys.executable).parent / program, *files]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60).stdout


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_shellcheck_has_nothing_to_say_against_the_scripts(
    variant: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    target, *arguments = variant
    assert render(target, tmp_path / "out", *arguments) == 0
    scripts = [file for file in (tmp_path / "out").iterdir() if file.is_file() and file.read_text().startswith("#!")]
    assert len(scripts) >= 2
    assert all(file.stat().st_mode & 0o111 for file in scripts)
    assert lint("shellcheck", *scripts) == ""
    scripts[0].write_text("#!/bin/bash\nrm $1\n")
    assert "SC2086" in lint("shellcheck", *scripts)


def test_hadolint_has_nothing_to_say_against_the_container_file(tmp_path: Path) -> None:
    assert lint("hadolint", CONTAINER / "Containerfile") == ""
    (tmp_path / "Containerfile").write_text("FROM python\n")
    assert "DL3006" in lint("hadolint", tmp_path / "Containerfile")


def test_the_image_holds_every_package_and_has_the_name_that_manifests_use() -> None:
    kept = (CONTAINER / "Containerfile.dockerignore").read_text().splitlines()
    assert kept[0] == "*"
    packages = {file.parent.name for file in REPOSITORY.glob("*/__init__.py")} - {
        "tests",
        "docs",
        "deploy",
        "benchmarks",
        "examples",
    }
    assert {line[1:] for line in kept if line.startswith("!")} == packages | {"LICENSE", "README.md", "pyproject.toml"}
    assert f"--tag slipstream:{__version__} " in (CONTAINER / "Containerfile").read_text()
