"""Where the base of a trainer lies, and what a GPU without room for it says."""

from pathlib import Path

import pytest

from consumer.learn.model import loading
from protocol.errors import DeviceError
from tests.gpu.conftest import Model
from tests.gpu.stand_in.cuda import Gpu
from tests.gpu.trainers import trainer

pytestmark = pytest.mark.stand_in


@pytest.fixture
def small_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes a gigabyte at once before it loads, which is an optimization."""
    monkeypatch.setattr("transformers.modeling_utils.caching_allocator_warmup", lambda *_, **__: None)


def base_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def test_a_base_lies_on_the_gpu_as_a_whole(tmp_path: Path, model: Model) -> None:
    made = trainer(tmp_path, model("llama"))
    assert {str(each.device) for each in made.model.parameters()} == {"cuda:0"}
    assert not getattr(made.base, "_hf_hook", None)


def test_a_base_that_does_not_fit_is_refused_and_not_offloaded(
    tmp_path: Path, model: Model, gpu: Gpu, small_gpus: None
) -> None:
    folder = model("llama")
    gpu.total_bytes = base_bytes(folder) // 2
    with pytest.raises(DeviceError, match=r"model\.path"):
        trainer(tmp_path, folder, dtype="float32")


def test_a_gpu_that_is_full_before_the_adapter_is_there_is_a_device_error(
    tmp_path: Path, model: Model, gpu: Gpu, small_gpus: None
) -> None:
    folder = model("llama")
    gpu.total_bytes = base_bytes(folder) + 4096
    with pytest.raises(DeviceError, match="no memory for the model"), loading("the trainer cannot be built"):
        trainer(tmp_path, folder, dtype="float32", lora={"r": 64, "target_modules": "all-linear"})


def test_in_turns_the_model_stays_in_host_memory(tmp_path: Path, model: Model, gpu: Gpu) -> None:
    made = trainer(tmp_path, model("llama"), pipeline={"gpu": "turns"})
    assert {str(each.device) for each in made.model.parameters()} == {"cpu"}
    assert gpu.allocated_bytes == 0
