"""The smallest configuration file, loaded and refused."""

from pathlib import Path

import pytest

from protocol.config.loader import load_config
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ExitCode

MINIMAL = """\
run_dir: runs/x
model:
  path: models/base
dataset:
  path: data.jsonl
rewards:
  functions:
    - function: rewards.py:exact
"""
NEXT = MINIMAL.count("\n") + 1  # the line that appended text starts at


def write_inputs(folder: Path) -> None:
    """Write the rows and the reward that the file names; its model is of the hub."""
    (folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (folder / "rewards.py").write_text("def exact(completions, **columns):\n    return [0.0] * len(completions)\n")


def load(path: Path, text: str = MINIMAL, overrides: list[str] | None = None) -> RunConfig:
    path.write_text(text)
    return load_config(str(path), overrides)


def refusal(path: Path, text: str = MINIMAL, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, text, overrides)
    assert caught.value.exit_code == ExitCode.CONFIG == 78
    return str(caught.value)
