"""README's quick start, command by command, with a small random model and no GPU."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from protocol.runtime import json_lines as rotated_lines
from tests.integration.models import build_model
from tests.integration.test_tutorial import commands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(json|yaml|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = [
    "model.path=model", "model.dtype=float32", "trainer.max_steps=2", "engine.max_model_len=256", "engine.max_num_seqs=32",
    "engine.enforce_eager=true", "sampling.max_completion_length=8", "pipeline.groups_per_step=2", "sampling.num_generations=8",
]  # fmt: skip
ANY_TEXT = "rewards.functions=[{function: numeric_match}, {function: 'rewards.py:various'}]"
"""Its built-in reward, and one that a random model gets: without any signal a run ends."""


def test_the_quick_start(short_dir: Path) -> None:
    blocks = BLOCK.findall((REPOSITORY / "README.md").read_text())
    files = {language: text for language, text in blocks if language != "sh"}
    lines = [line for language, text in blocks if language == "sh" for line in text.splitlines()]
    assert [line.split()[1] for line in lines] == ["run", "status", "export"]
    task = short_dir / "task"
    build_model("llama", task / "model")
    (task / "run.yaml").write_text(files["yaml"])
    rows = [json.loads(files["json"]) | {"answer": str(number)} for number in range(40)]
    (task / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = (
        "def various(completions, **_):\n    return [float(sum(map(ord, c[0]['content'])) % 7) for c in completions]\n"
    )
    (task / "rewards.py").write_text(reward)
    environment = os.environ | {
        "PATH": f"{commands(short_dir / 'bin')}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(short_dir / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    settings = " ".join(f'--set "{each}"' for each in [*SMALL, ANY_TEXT])
    for line in lines:
        command = re.sub(r"(--\w+-gpus) \d", r"\1 cpu", line)
        command = {"run": f"{command} {settings}", "export": f"{command} --gpu cpu"}.get(line.split()[1], command)
        done = subprocess.run(
            ["bash", "-c", command], cwd=task, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert [step["step"] for step in rotated_lines.read(task / "runs/sums/steps.jsonl")] == [1, 2]
    assert (task / "runs/sums/adapter/adapter_config.json").is_file()
    assert (task / "sums/config.json").is_file()
