"""The engine as GPU users get it, as far as a CPU can show: the table of its configurations, and engines that compute.

Each runs in a process of its own. Not shown: CUDA graphs, compiled kernels, NCCL, sleep, speed, and bfloat16, in which Triton's
interpreter computes wrongly.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from producer.engine.configuration import num_places
from tests.gpu.stand_in import building
from tests.gpu.vllm import configurations
from tests.integration.models import build_model
from tests.tools import require

REPOSITORY = Path(__file__).parents[3]
LIMIT_S = 560
HERE = "tests/gpu/vllm"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def test_configurations_of_engines_on_gpus_are_those_of_the_table(tmp_path: Path) -> None:
    """When vLLM or we change one, see whether the change is wanted; `--write` makes the table anew."""
    said = run("tests.gpu.vllm.configurations", str(build_model("qwen2", tmp_path)))
    made: dict[str, dict[str, Any]] = json.loads(said.splitlines()[-1])
    assert made == configurations.table()


def test_a_producer_on_a_gpu_is_given_the_batches_of_a_server() -> None:
    rows = [row for rows in configurations.table().values() for row in rows.values() if "refused" not in row]
    assert len(rows) > 30
    assert {row["runner"] for row in rows} == {"V2"}
    assert min(row["max_num_seqs"] for row in rows) >= 256
    assert min(row["max_num_batched_tokens"] for row in rows) >= 2048


def test_every_step_that_decodes_has_a_graph_and_every_step_of_a_small_model() -> None:
    for rows in configurations.table().values():
        for name in configurations.PARAMETERS:
            row = rows[name]
            assert num_places(row["max_num_seqs"], 4) in row["graph_sizes"]  # groups of 4
            is_whole = row["graph_sizes"][-1] == row["max_num_batched_tokens"]
            assert is_whole == (name in ("0.1 B", "0.6 B"))


def test_engines_under_model_runner_v2() -> None:
    run("pytest", "-q", "--timeout=540", "-p", "tests.gpu.vllm.v2", "-k", "not never", f"{HERE}/engine_under_v2.py")


def test_the_gpu_worker() -> None:
    require(building.COMPILER, "g++")
    run("pytest", "-q", "--timeout=540", "-p", "tests.gpu.vllm.worker", f"{HERE}/engine_on_gpu.py")
