"""The GPU that `rl-trainer` takes where the command line names none, and ranks that it refuses."""

import argparse
import contextlib
from pathlib import Path

import pytest

from consumer.app import cli, daemon
from protocol.config.loader import load_config
from protocol.errors import ConfigError
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
    arguments = argparse.Namespace(gpu=named, ranks=None, nodes=1)
    cli._prepare(load_config(str(tmp_path / "run.yaml"), overrides), arguments)
    assert arguments.gpu == taken


@pytest.mark.parametrize(
    ("gpu", "ranks", "nodes", "overrides", "problem"),
    [
        ("0,1", None, 1, ["trainer.optim=adafactor"], "trainer.optim: adafactor"),
        ("cpu", 2, 1, ["trainer.optim=adamw_8bit", "trainer.fp16=true"], "trainer.optim: adamw_8bit.*; trainer.fp16"),
        ("0", None, 2, ["trainer.fp16=true"], "trainer.fp16"),
        ("0", None, 1, ["trainer.optim=adafactor"], ""),
        ("0,1", None, 1, ["trainer.optim=adafactor", "pipeline.shard_base=none"], ""),
        ("0,1", None, 1, ["trainer.optim=adafactor", "lora={}"], ""),
        ("0,1", None, 1, [], ""),
    ],
)
def test_ranks_that_cannot_share_the_weights_are_refused_before_anything_is_loaded(
    gpu: str, ranks: int | None, nodes: int, overrides: list[str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    arguments = argparse.Namespace(gpu=gpu, ranks=ranks, nodes=nodes)
    config = load_config(str(tmp_path / "run.yaml"), ["lora=null", *overrides])
    with pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext():
        cli._prepare(config, arguments)
    assert arguments.num_ranks == nodes * (2 if "," in gpu else ranks or 1)


def test_a_trainer_on_a_cpu_leaves_one_of_its_cores_and_counts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(4)))
    taken: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    daemon._prepare_device([])
    assert taken == [3]
