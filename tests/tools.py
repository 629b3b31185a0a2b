"""Programs and packages that some tests need and not every machine has."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
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
    wanted = sys.executable if sys.version_info >= at_least else f">={at_least[0]}.{at_least[1]}"
    return _made_once(package, (REQUIREMENTS / f"{package}.txt").read_text(), python=wanted)


def python_above_ours(name: str, releases: list[str]) -> str:
    """Return a Python that has these releases, in a virtual environment that is made once, and beneath them all of ours."""
    ours = sysconfig.get_path("purelib")
    return _made_once(name, "\n".join(releases), "--no-deps", beneath=f"import site; site.addsitedir({ours!r})")


def _made_once(name: str, requirements: str, *options: str, python: str = sys.executable, beneath: str = "") -> str:
    digest = hashlib.sha256(f"{sys.version}\n{beneath}\n{requirements}".encode()).hexdigest()[:12]
    folder = ENVIRONMENTS / f"{name}-{digest}"
    made, complete = folder / "bin" / "python", folder / "complete"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of tests beside this one
        if not complete.exists():
            uv("venv", "--clear", "--no-python-downloads", "--python", python, str(folder))
            uv("pip", "install", "--python", str(made), *options, "--requirement", "-", text=requirements)
            [packages] = folder.glob("lib/*/site-packages")
            (packages / "beneath.pth").write_text(beneath)
            complete.touch()
    return str(made)


def uv(*arguments: str, text: str = "") -> str:
    """Run uv with this standard input, and return its output. Give the test up where it fails."""
    command = [sys.executable, "-m", "uv", "--quiet", *arguments]
    pyenv = sorted(map(str, Path(os.environ.get("PYENV_ROOT", "/nonexistent"), "versions").glob("*/bin")))
    environment = os.environ | {"PATH": os.pathsep.join([*pyenv, os.environ["PATH"]])}  # before pyenv's shims
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        give_up(f"cannot run uv {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout
