"""What the trainer takes of a GPU that it shares, from a scripted device."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from consumer.app.gpu_share import gpu_share
from consumer.learn.adapted_linear import use_adapted_products
from consumer.ranks.placement import Nodes, Placement
from protocol.errors import ConfigError, DeviceError
from protocol.gpu import reservation as seat
from protocol.gpu import reservation as tenants
from protocol.gpu.memory import GIB, layer_bytes
from protocol.gpu.model_files import ModelShape
from protocol.gpu.nvml import Gpu
from tests.unit.protocol.gpu.models import run_of, write_model

GPU = Gpu(0, "GPU-a", 80 * GIB, 79 * GIB)
ALONE = Placement((0,), 1)


class Device:
    """A GPU of which CUDA sees a little less than NVML."""

    def __init__(self) -> None:
        self.free = self.total = 79 * GIB

    def limit(self, share: float) -> int:
        self.limited = int(share * self.total)
        return self.limited

    def reserve(self, num_bytes: int) -> object:
        if num_bytes > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.free -= num_bytes
        return "anchor"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(seat, "gpu_facts", lambda index: GPU)
    monkeypatch.setattr(tenants, "ROOT", tmp_path)
    return write_model(tmp_path / "model")


def test_it_takes_its_share_and_leaves_room_for_small_tensors(folder: Path) -> None:
    device, config = Device(), run_of(folder, engine={"gpu_memory_utilization": 0.5})
    with gpu_share(config, ALONE, lambda: False, device) as held:
        assert held == "anchor"
    share = int(0.97 * 80 * GIB) - 3 * GIB // 2 - 40 * GIB
    assert device.limited == int(share / (80 * GIB) * 79 * GIB)
    assert 79 * GIB - device.free == device.limited - 512 * 16 - 2**28  # 512 trained parameters with gradient and Adam


def test_a_share_that_the_gpu_refuses(folder: Path) -> None:
    device = Device()
    device.free = GIB
    config = run_of(folder, engine={"gpu_memory_utilization": 0.5})
    said = r"refuses the trainer's share of 36.1 GiB: CUDA out of memory"
    with pytest.raises(DeviceError, match=said), gpu_share(config, ALONE, lambda: False, device):
        pass


def test_one_that_is_to_stop_takes_nothing_while_the_engine_measures(folder: Path) -> None:
    device, config = Device(), run_of(folder)
    with (
        tenants.tenancy(GPU.uuid, "producer", "run") as producer,
        producer.alone(0.0, lambda: False, pytest.fail),
        gpu_share(config, ALONE, lambda: True, device) as held,
    ):
        assert held is None
    assert device.free == device.total


def test_alone_on_its_gpu_it_is_limited_by_nothing(folder: Path) -> None:
    for config, placement in ((run_of(folder, pipeline={}), ALONE), (run_of(folder), Placement((), 2))):
        with gpu_share(config, placement, lambda: False, Device()) as held:
            assert held is None


SEVERAL = Placement((0, 1), 2)


@pytest.mark.parametrize(
    ("mode", "placement"),
    [
        ("shared", SEVERAL),
        ("shared", Placement((0,), 1, Nodes(2, 0, "10.0.0.5", 5600))),
        ("turns", SEVERAL),
        ("turns", Placement((), 2)),
    ],
)
def test_several_ranks_are_refused(folder: Path, mode: str, placement: Placement) -> None:
    share = gpu_share(run_of(folder, pipeline={"gpu": mode}), placement, lambda: False, Device())
    with pytest.raises(ConfigError, match=f"{mode} is for a trainer of one rank"), share:
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_autograd_keeps_is_about_what_was_estimated(dtype: torch.dtype, dropout: float) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    lora = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    model = get_peft_model(Qwen2ForCausalLM(Qwen2Config(**shape, **heads)).to(dtype), lora).train()
    use_adapted_products(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        model.base_model.model.model(input_ids=torch.zeros(2, 128, dtype=torch.long), use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 256 / 2
    estimated = layer_bytes(ModelShape((), 64, 176, 2, 64, 64, 32, 128), dtype.itemsize, drops=dropout > 0)
    assert 0.9 <= measured / estimated <= 1.05
