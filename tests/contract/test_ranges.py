"""The oldest and the newest releases that pyproject.toml allows pass the unit tests, each set in an environment of its own.

Guarantee: what pip may install beside torch has run. torch is ours in both, because other builds for CPUs are not in an index.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.tools import python_above_ours, uv

REPOSITORY = Path(__file__).parents[2]
WITHOUT_TORCH = "torch ; python_version < '3'"
SUBJECTS = [
    "contract",
    *(
        f"unit/{package}"
        for package in ("protocol", "replay", "consumer", "producer", "slipstream", "slipstream_extras")
    ),
]
# An old release uses former names of newer ones, and closes less.
OLD_BESIDE_NEW = ("-W", "default::DeprecationWarning", "-W", "default::pytest.PytestUnraisableExceptionWarning")


def is_ours(release: str) -> bool:
    """Return whether the environment of this test has the release already."""
    name, _, number = release.partition("==")
    try:
        return version(name) == number
    except PackageNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "resolution", "options"), [("oldest", "lowest-direct", OLD_BESIDE_NEW), ("newest", "highest", ())]
)
def test_a_range_is_what_has_run(name: str, resolution: str, options: tuple[str, ...], tmp_path: Path) -> None:
    overrides = tmp_path / "overrides.txt"
    overrides.write_text(WITHOUT_TORCH)
    form = ("--no-header", "--no-annotate", "--python", sys.executable, "--extra", "quantization")
    allowed = uv(
        *("pip", "compile", "--resolution", resolution, "--override", str(overrides), *form),
        str(REPOSITORY / "pyproject.toml"),
    )
    releases = [release for release in allowed.split() if not is_ours(release)]
    assert any(release.startswith("transformers==") for release in releases), "both ends are other releases than ours"
    tests = [f"tests/{subject}" for subject in SUBJECTS]
    done = subprocess.run(
        [
            python_above_ours(name, releases),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not long",
            *options,
            *tests,
        ],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"with {', '.join(releases)}:\n{done.stdout[-10_000:]}"
