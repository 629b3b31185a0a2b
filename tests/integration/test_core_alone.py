"""A run whose processes find no `slipstream_extras`: the core trains without it, and names what a key needs of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from protocol.runtime import json_lines
from tests.integration.test_pair import REWARD, write_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[2]
ABSENT = "raise ModuleNotFoundError(\"No module named 'slipstream_extras'\", name='slipstream_extras')\n"


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `slipstream` in new processes, in which an import of the extras fails as where they are not installed."""
    (folder / "slipstream_extras.py").write_text(ABSENT)
    path = f"{folder}:{os.environ.get('PYTHONPATH', REPOSITORY)}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "slipstream", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_core_trains_without_extras(short_dir: Path) -> None:
    config = write_run(short_dir, "qwen2", [{"prompt": f"{i}+1="} for i in range(8)], REWARD, trainer={"max_steps": 2})
    ended = run(short_dir, "run", "--config", str(config), "--producer-gpus", "cpu", "--trainer-gpus", "cpu")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert [line["step"] for line in json_lines.read(short_dir / "run/steps.jsonl")] == [1, 2]


def test_a_key_of_an_extra_says_what_is_missing(short_dir: Path) -> None:
    config = write_run(short_dir, "qwen2", [{"prompt": "1+1="}], REWARD, serve={"enabled": True})
    ended = run(short_dir, "run", "--config", str(config), "--producer-gpus", "cpu", "--trainer-gpus", "cpu")
    assert ended.returncode == ExitCode.CONFIG
    assert "serve.enabled" in ended.stdout + ended.stderr
    assert "slipstream_extras" in ended.stdout + ended.stderr
