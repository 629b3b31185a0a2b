"""The command lines, by hand."""

import sys
from pathlib import Path

from slipstream.cluster.plan import daemon_command
from tests.unit.slipstream.cluster.builders import PLAN, plan

FOLDER, KEYS = Path("/home/u/.cache/slipstream/x/producer-2"), Path("/tmp/slipstream-scratch-1")


def test_the_trainer_on_the_gpus_that_ray_gave_it() -> None:
    assert daemon_command(PLAN, "trainer", ["2", "3"], FOLDER, KEYS) == [
        sys.executable, "-P", "-m", "consumer.app.cli", "--gpu", "2,3", "--config", "/home/u/run.yaml",
        "--set", "pipeline.max_staleness=2", "--resume",
    ]  # fmt: skip


def test_a_producer_has_an_address_and_a_key_and_no_file_of_the_run() -> None:
    assert daemon_command(PLAN, "producer-2", ["1"], FOLDER, KEYS) == [
        sys.executable, "-P", "-m", "producer.app.cli", "--gpu", "1", "--connect", "tcp://10.0.0.5:20000", "--keys", str(KEYS),
        "--set", "transport.identity=producer-2", "--set", f"run_dir={FOLDER}",
    ]  # fmt: skip
    changed = plan(gpus=0, model="/models/a", producer_overrides=["serve.host=10.0.0.6"])
    assert daemon_command(changed, "producer-2", [], FOLDER, KEYS)[-8:-4] == [
        "--model", "/models/a", "--set", "serve.host=10.0.0.6",
    ]  # fmt: skip


def test_the_trainer_on_the_cpu() -> None:
    command = daemon_command(plan(gpus=0), "trainer", [], FOLDER, KEYS)
    assert command[4:6] == ["--gpu", "cpu"]
    assert command[-3:] == ["--resume", "--ranks", "2"]
