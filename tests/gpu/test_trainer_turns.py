"""A trainer that is on the stand-in GPU in its turns, and what it publishes meanwhile."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.device_moves import DeviceMoves
from consumer.link.probe import PolicyProbe
from consumer.link.snapshots import AdapterSnapshots
from consumer.link.weight_snapshots import WeightSnapshots
from replay.batch_selection import TrainingBatch
from tests.gpu.conftest import Model
from tests.gpu.stand_in.cuda import Gpu
from tests.gpu.trainers import trainer

pytestmark = pytest.mark.stand_in

_SMALLEST_BLOCK = 512  # bytes
_FULL = {"lora": None, "trainer": {"beta": 0.1}}
_MERGED = {
    "lora": {"init_lora_weights": "pissa", "use_dora": True, "modules_to_save": ["lm_head"]},
    "trainer": {"beta": 0.1},
}


class Turns:
    """The trainer leaves the GPU before every batch but the first, and comes back for it."""

    def __init__(self, made: SlipstreamTrainer) -> None:
        self.made = made
        self.moves = DeviceMoves(made.accelerator.device, made.kept_tensors, made.forget_batch)
        self.left: list[int] = []  # bytes of the GPU in use when it has left, by turn
        self.published: list[bytes] = []
        model = made.accelerator.unwrap_model(made.model)
        self.probe = PolicyProbe(np.arange(8, dtype=np.int32)[None], 1, model, made.accelerator.autocast)
        adapter = getattr(model, "peft_config", {}).get("default")
        is_served = adapter is not None and not adapter.use_dora
        self.snapshots = AdapterSnapshots(model) if is_served else WeightSnapshots(model)
        self._batches = made._batches
        made._batches = self._in_turns()

    def _in_turns(self) -> Iterator[TrainingBatch]:
        for number, batch in enumerate(self._batches):
            if not number and isinstance(self.snapshots, WeightSnapshots):
                self.probe.measure_base()
            if number:
                self.publish(number)
                self.moves.out()
                gc.collect()
                self.left.append(torch.cuda.memory_allocated())
                self.moves.back()
            yield batch

    def publish(self, number: int) -> None:
        snapshot = self.snapshots.take(self.probe.measure(number))
        policy = snapshot.published(number)
        self.published.append(bytes(policy.data))
        policy.release()


@pytest.mark.parametrize("options", [{}, {"trainer": {"beta": 0.1, "gradient_checkpointing": True}}, _FULL])
def test_nothing_of_a_step_stays_on_the_gpu_between_turns(
    options: dict[str, Any], tmp_path: Path, model: Model
) -> None:
    turns = Turns(trainer(tmp_path, model("llama"), steps=3, pipeline={"gpu": "turns"}, **options))
    assert turns.made.row_passes.kernel is None
    turns.moves.back()
    turns.made.train()
    assert turns.made.row_passes.kernel is not None
    assert turns.made.row_passes.kernel.name == "torch's flex_attention", "it is chosen where the passes are"
    assert len(turns.left) == 2
    assert max(turns.left) <= 2 * _SMALLEST_BLOCK, "two losses that transformers keeps, whatever the size of the step"


@pytest.mark.parametrize("options", [{}, _FULL, _MERGED], ids=["adapter", "full", "merged by the trainer"])
def test_turns_change_no_bit_of_a_policy(options: dict[str, Any], tmp_path: Path, model: Model) -> None:
    def published(name: str, sharing: str) -> list[bytes]:
        folder = tmp_path / name
        folder.mkdir()
        turns = Turns(trainer(folder, model("llama"), steps=3, pipeline={"gpu": sharing}, **options))
        if sharing == "turns":
            turns.moves.back()
        else:
            turns.moves.out = turns.moves.back = lambda: None  # type: ignore[method-assign]
        turns.made.train()
        turns.publish(3)
        return turns.published

    turned, stayed = published("turned", "turns"), published("stayed", "own")
    assert len(set(turned)) == 3
    assert turned == stayed


def test_a_snapshot_in_a_turn_is_copied_beside_the_gpus_work(tmp_path: Path, model: Model) -> None:
    turns = Turns(trainer(tmp_path, model("llama"), pipeline={"gpu": "turns"}))
    turns.moves.back()
    snapshot = turns.snapshots.take(turns.probe.measure(0))
    assert snapshot.copied is not None
    assert snapshot.blob.is_pinned()


def test_a_turn_without_room_moves_nothing(tmp_path: Path, model: Model, gpu: Gpu) -> None:
    made = trainer(tmp_path, model("llama"), pipeline={"gpu": "turns"})
    moves = DeviceMoves(made.accelerator.device, made.kept_tensors)
    gpu.total_bytes = moves.num_bytes // 2
    with pytest.raises(torch.OutOfMemoryError):
        moves.back()
    assert {str(each.device) for each in made.model.parameters()} == {"cpu"}
    assert gpu.allocated_bytes == 0
    gpu.total_bytes = moves.num_bytes * 2
    moves.back()
    assert {str(each.device) for each in made.model.parameters()} == {"cuda:0"}
