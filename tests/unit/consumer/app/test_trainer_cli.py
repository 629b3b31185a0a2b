"""Which GPU `rl-trainer` takes where the command line names none."""

import argparse
from pathlib import Path

import pytest

from consumer.app import cli
from protocol.gpu import nvml as device
from protocol.gpu.nvml import VisibleGpu
from tests.unit.protocol.config.files import MINIMAL


@pytest.mark.parametrize(
    ("count", "sharing", "named", "taken"),
    [
        (2, "own", None, "1"),
        (1, "own", None, "0"),
        (0, "own", None, "0"),
        (2, "shared", None, "0"),
        (2, "turns", None, "0"),
        (2, "own", "0", "0"),
        (2, "own", "cpu", "cpu"),
    ],
)
def test_a_trainer_leaves_the_first_gpu_to_its_producer(
    count: int, sharing: str, named: str | None, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    gpus = [VisibleGpu(index, f"GPU-{index}") for index in range(count)]
    monkeypatch.setattr(device, "visible_gpus", lambda given: gpus)
    overrides = [f"pipeline.gpu={sharing}"]
    arguments = argparse.Namespace(
        config=str(tmp_path / "run.yaml"), overrides=overrides, gpu=named or cli._DEFAULT_GPU
    )
    with cli._load(arguments):
        assert arguments.gpu == taken
