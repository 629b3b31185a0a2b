"""Programs and packages that some tests need and not every machine has."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

REQUIREMENTS = Path(__file__).with_name("requirements")
ENVIRONMENTS = Path(__file__).parents[1] / "build" / "environments"


def give_up(reason: str) -> NoReturn:
    """Skip the test; fail it in CI, which has to have everything."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def require(tool: str, package: str) -> None:
    """Give the test up where the program is missing."""
    if shutil.which(tool) is None:
        give_up(f"this machine has no {tool} (package {package})")


def python_with(package: str, at_least: tuple[int, int] = (3, 11)) -> str:
    """Return a Python that has the releases of requirements/PACKAGE.txt, in a virtual environment that is made once.

    They need other releases of what we have, or a newer Python. A list is written anew by
    `uv pip compile --universal --no-annotate --no-header --python-version 3.11`.
    """
    requirements = REQUIREMENTS / f"{package}.txt"
    digest = hashlib.sha256(f"{sys.version}\n{requirements.read_text()}".encode()).hexdigest()[:12]
    folder = ENVIRONMENTS / f"{package}-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of tests beside this one
        if not complete.exists():
            wanted = sys.executable if sys.version_info >= at_least else f">={at_least[0]}.{at_least[1]}"
            _uv("venv", "--clear", "--no-python-downloads", "--python", wanted, str(folder))
            _uv("pip", "install", "--python", str(python), "--requirement", str(requirements))
            complete.touch()
    return str(python)


def _uv(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv", "--quiet", *arguments]
    pyenv = sorted(map(str, Path(os.environ.get("PYENV_ROOT", "/nonexistent"), "versions").glob("*/bin")))
    environment = os.environ | {"PATH": os.pathsep.join([*pyenv, os.environ["PATH"]])}  # before pyenv's shims
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        give_up(f"cannot run uv {' '.join(arguments)}: {done.stderr[-2000:]}")
