"""The GPU check runs here without a GPU, in its smallest sizes; no time is judged."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.warm_commands import WarmCommands

pytestmark = pytest.mark.integration

PARTS = (
    "machine",
    "demo",
    "beside-trl",
    "parity-adapter",
    "step",
    "packing",
    "engine-a",
    "engine-defaults",
    "engine-h",
    "engine-h-mps",
)


@pytest.mark.timeout(1000)
def test_on_a_cpu(short_dir: Path, warm: WarmCommands) -> None:
    command = [warm.python, "-m", "benchmarks.gpu_check", "--gpu", "cpu", "--minutes", "15", "--out", str(short_dir)]
    environment = os.environ | warm.variables
    done = subprocess.run(
        [*command, "--parts", *PARTS], env=environment, capture_output=True, text=True, timeout=950, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = {part["part"]: part for part in json.loads((short_dir / "results.json").read_text())["parts"]}
    without = ("not run", "it needs an NVIDIA GPU")
    assert {name: (part["status"], part["reason"]) for name, part in parts.items()} == {
        "machine": ("done", ""),
        "demo": without,
        "beside-trl": ("done", ""),
        "parity-adapter": ("done", ""),
        "step": ("done", ""),
        "packing": without,
        "engine-a": ("done", ""),
        "engine-defaults": ("done", ""),
        "engine-h": ("done", ""),
        "engine-h-mps": ("not run", "nvidia-cuda-mps-control is not installed"),
    }
    found = {finding["what"]: finding for part in parts.values() for finding in part["findings"]}
    assert found["scoring / trainer"]["abs_max"] < 1e-4 < found["trainer / base"]["abs_max"] / 10
    assert found["ours"]["loss"] == pytest.approx(found["trl"]["loss"], abs=1e-5)
    assert found["ours"]["gradient_norm"] == pytest.approx(found["trl"]["gradient_norm"], rel=1e-4)
    for arm in ("own engine", "TRL AsyncGRPO"):
        assert found[arm]["step_s"] > 0
        assert found[f"{arm}, after step 5"]["sampled_tokens"] > found[f"{arm}, after step 4"]["sampled_tokens"] > 0
    for name in ("engine-a", "engine-defaults", "engine-h"):
        start, few, many = parts[name]["findings"]
        assert min(few["tokens_per_s"], many["tokens_per_s"], start["seconds"]) > 0
        assert few["sequences_a_step"] <= many["sequences_a_step"], "longer completions end more rarely"
    assert many["trainer_steps_per_s"] >= 0
    assert "| packing | **not run** | it needs an NVIDIA GPU |" in (short_dir / "table.md").read_text()
