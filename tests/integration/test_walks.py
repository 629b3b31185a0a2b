"""The command that traces the four walks through the house."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.warm_commands import WarmCommands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).parents[2]
MOST_FILES = 30, 44, 26, 29
"""Of each walk. They fall, and rise only with a sentence in CHANGELOG.md; runs differ by a file."""


def test_each_walk_is_traced_from_its_first_file_to_its_last(warm: WarmCommands) -> None:
    command = [warm.python, "-m", "docs.walks", "--list"]
    environment = os.environ | warm.variables
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    walks = re.split(r"^a ", ended.stdout, flags=re.MULTILINE)[1:]
    files = [re.findall(r"^    (\S+\.py): ", walk, re.MULTILINE) for walk in walks]
    assert [int(re.findall(r" (\d+) +\d+ +\d+ +\d+\n", walk)[0]) for walk in walks] == [len(own) for own in files]
    assert len(files) == 4
    assert all(len(own) <= most for own, most in zip(files, MOST_FILES, strict=True)), list(map(len, files))
    for own, ours in zip(files, ("producer/", "consumer/", "consumer/", "producer/"), strict=True):
        assert any(file.startswith(ours) for file in own)
        assert any(file.startswith("protocol/") for file in own)
        assert all((REPOSITORY / file).is_file() for file in own)
