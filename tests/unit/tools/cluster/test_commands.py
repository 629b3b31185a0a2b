"""The command lines, by hand."""

import sys
from pathlib import Path

from tests.unit.tools.cluster.builders import PLAN, plan
from tools.cluster.fleet.commands import daemon_command

FOLDER, KEYS = Path("/home/u/.cache/slipstream/x/producer-2"), Path("/tmp/slipstream-scratch-1")


def test_the_trainer_on_the_gpus_that_ray_gave_it() -> None:
    assert daemon_command(PLAN, "trainer", [2, 3], FOLDER, KEYS) == [
        sys.executable, "-m", "consumer.cli", "--gpu", "2,3", "--config", "/home/u/run.yaml",
        "--set", "pipeline.max_staleness=2", "--resume",
    ]  # fmt: skip


def test_the_trainer_on_the_cpu() -> None:
    command = daemon_command(plan(gpus=0), "trainer", [], FOLDER, KEYS)
    assert command[3:5] == ["--gpu", "cpu"]
    assert command[-3:] == ["--resume", "--ranks", "2"]
