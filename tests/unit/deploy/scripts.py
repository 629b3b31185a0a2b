"""Programs that stand in for those which the scripts of deploy/ call."""

import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
KEYS = """
mkdir -p keys/authorized
if [ "$2" = authorize ]; then touch "keys/authorized/$3.public"; else touch "keys/$3.secret" "keys/$3.public"; fi
"""
"""What `slipstream keys` leaves behind, without keys in it."""


def stand_in(folder: Path, name: str, script: str) -> None:
    """A program in `folder` that notes its arguments in the file `calls` there, before it runs the script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >>{folder}/calls\n{script}\n')
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def bash(script: Path, programs: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in its folder, with `programs` in front of others."""
    values = {"PATH": f"{programs}:{os.environ['PATH']}"} | environment
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, cwd=script.parent, env=values, capture_output=True, text=True, timeout=60)
