"""Rendered files in a folder, and programs that stand in for those which the scripts call."""

import os
import subprocess
from pathlib import Path

import yaml

from slipstream.cluster.cli import main

VALUES = {
    "run_dir": "runs/My_Run",
    "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
    "dataset": {"path": "openai/gsm8k", "name": "main", "transform": "tasks/sums.py:to_prompt"},
    "rewards": {"functions": [{"function": "tasks/sums.py:right"}]},
}


KEYS = """
mkdir -p keys/authorized
if [ "$3" = authorize ]; then touch "keys/authorized/$4.public"; else touch "keys/$4.secret" "keys/$4.public"; fi
"""
"""What `rl-keys` leaves behind, without keys in it."""


def project(folder: Path, **sections: object) -> Path:
    """A run's folder: its configuration, a module of its own and one that this imports. Returns the configuration's file."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    (folder / "tasks" / "sums.py").write_text("import helpers\n\n\ndef right(): ...\n\n\ndef to_prompt(): ...\n")
    (folder / "helpers.py").write_text("'''Ümlaut: $HOME'''\n")
    (folder / "unused.py").write_text("")
    (folder / "run.yaml").write_text(yaml.safe_dump(VALUES | sections, sort_keys=False))
    return folder / "run.yaml"


def render(target: str, out: Path, *arguments: str) -> int:
    """In the run's folder."""
    return main(["render", target, "--config", "run.yaml", "--out", str(out), *arguments])


def run_name(out: Path) -> str:
    """Of the run whose files are in `out`."""
    return (out / "run_name").read_text().strip()


def stand_in(folder: Path, name: str, script: str) -> None:
    """A program in `folder` that notes its arguments in the file `calls` there, before it runs the script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >>{folder}/calls\n{script}\n')
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def bash(script: Path, programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script whose own folder of programs was replaced by `programs`."""
    path = f"{programs}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(script)], env={"PATH": path} | environment, capture_output=True, text=True, timeout=60
    )
