"""Snapshots of a model on the stand-in GPU: what the publisher's thread needs is in host memory before it gets there."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from consumer.learn.model import load_model
from consumer.link.probe import Measurement, Probe
from consumer.link.snapshots import AdapterSnapshots
from consumer.link.weight_snapshots import WeightSnapshots
from tests.integration.models import build_model

if TYPE_CHECKING:
    from tests.gpu.stand_in.cuda import Gpu

pytestmark = pytest.mark.stand_in


@pytest.mark.parametrize("trains_weights", [True, False])
def test_the_publisher_waits_for_no_work_of_the_gpu(tmp_path: Path, gpu: "Gpu", trains_weights: bool) -> None:
    model = load_model(build_model("llama", tmp_path / "model", num_layers=1)).cuda()
    snapshots: Any = (
        WeightSnapshots(model)
        if trains_weights
        else AdapterSnapshots(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])))
    )
    numbers = torch.arange(6, dtype=torch.float32, device="cuda").view(2, 3)
    measured = Measurement(Probe(b"", 4, b"", b""), numbers)
    assert numbers.is_cuda
    before = gpu.num_syncs
    snapshot = snapshots.take(measured)
    assert gpu.num_syncs == before, "nor does the thread that trains"
    assert snapshot.probe.logprobs.is_pinned()
    policy = snapshot.published(1)
    assert gpu.num_syncs == before, "but for the event of the copy"
    assert policy.probe.policy == torch.arange(3, dtype=torch.float32).numpy().tobytes()
    assert policy.probe.exact == torch.arange(3, 6, dtype=torch.float32).numpy().tobytes()
