"""A run from a folder whose name is a pattern, by a user without a name, a home, or a temporary folder that is there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.models import build_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

REWARDS = """
def length(completions, **_):
    return [float(len(text)) for text in completions]
"""
WITHOUT_NAME = """
import pwd

def nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = nobody
"""


def test_a_run_needs_no_plain_paths_and_no_home(short_dir: Path) -> None:
    place = short_dir / "r [a]*{x}%41"
    place.mkdir()
    build_model("qwen2", place / "model [b]?")
    (place / "rows[1]*.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "ba"}\n' * 8)
    (place / "rewards {1}.py").write_text(REWARDS)
    (place / "sitecustomize.py").write_text(WITHOUT_NAME)
    values = {
        "run_dir": "run[1]*{}%20",
        "model": {"path": "./model [b]?", "dtype": "float32"},
        "dataset": {"path": "rows[1]*.jsonl"},
        "rewards": {"functions": [{"function": "rewards {1}.py:length"}], "num_workers": 1},
        "sampling": {"num_generations": 4, "max_completion_length": 8},
        "pipeline": {"groups_per_step": 2},
        "lora": {"r": 8, "lora_alpha": 16},
        "engine": {"max_model_len": 64, "max_num_seqs": 16, "enforce_eager": True, "num_gpu_blocks_override": 64},
        "trainer": {"max_steps": 2, "save_steps": 1, "report_to": "tensorboard"},
    }
    (place / "run.yaml").write_text(yaml.safe_dump(values))
    (place / "tmp [t]").mkdir()
    repository = Path(__file__).parents[2]
    environment = os.environ | {
        "HOME": "/proc/nobody", "TMPDIR": str(place / "tmp [t]"), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{place}:{repository}",
    }  # fmt: skip
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "XDG_CACHE_HOME", "HF_HOME"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "slipstream", "run", "--config", "run.yaml"]
    try:
        ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=360)
        assert ended.returncode == 0, ended.stdout[-4000:]
        assert (place / "run[1]*{}%20" / "adapter" / "adapter_model.safetensors").is_file()
        command[3:] = ["export", "--run", "run[1]*{}%20", "--gpu", "cpu", "--to", "merged [m]"]
        ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert (place / "merged [m]" / "model.safetensors").is_file()
    finally:
        shutil.rmtree(place, ignore_errors=True)
