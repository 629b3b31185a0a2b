"""`slipstream init` and `slipstream run`: from an empty folder to an adapter, with a small random model and no GPU."""

import subprocess
from pathlib import Path

import pytest

from protocol.runtime import json_lines as rotated_lines
from tests.integration.models import build_model
from tests.integration.test_pair import CHAT_REWARD
from tests.integration.warm_commands import WarmCommands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SMALL = [
    "model.path=model", "model.dtype=float32", "trainer.max_steps=2", "engine.max_num_seqs=32", "engine.enforce_eager=true",
    "sampling.max_completion_length=8", "pipeline.groups_per_step=2",
    "rewards.functions=[{function: 'rewards.py:right'}, {function: 'various.py:length'}]",  # a random model is never right
]  # fmt: skip


def test_from_an_empty_folder_to_an_adapter(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, warm: WarmCommands
) -> None:
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | warm.variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(short_dir / "cache"))
    task = short_dir / "task"
    command = [warm.python, "-m", "slipstream"]
    subprocess.run([*command, "init", "task"], cwd=short_dir, check=True, timeout=60)
    build_model("llama", task / "model")
    (task / "various.py").write_text(CHAT_REWARD)
    settings = [part for each in SMALL for part in ("--set", each)]
    gpus = ["--producer-gpus", "cpu", "--trainer-gpus", "cpu"]
    done = subprocess.run(
        [*command, "run", "--config", "run.yaml", *gpus, *settings],
        cwd=task,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert [step["step"] for step in rotated_lines.read(task / "runs/first/steps.jsonl")] == [1, 2]
    assert (task / "runs/first/adapter/adapter_config.json").is_file()
