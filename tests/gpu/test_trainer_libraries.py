"""What only a GPU makes libraries do: attention of variable length, layers that ranks share, a part of a GPU."""

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from consumer.app.gpu_share import CudaDevice
from consumer.learn import model as sharding
from consumer.learn.model import is_sharded, shard_base
from consumer.ranks import exchange as work
from consumer.ranks.exchange import ALONE, ProcessRanks
from tests.gpu.conftest import Model
from tests.gpu.stand_in import flex
from tests.gpu.stand_in.cuda import Gpu
from tests.gpu.syncs import Syncs
from tests.gpu.trainers import trainer

pytestmark = pytest.mark.stand_in

PACKAGES = Path(__file__).parent / "stand_in" / "packages"


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers finds the package and takes it for the real one."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    from transformers.utils import import_utils

    monkeypatch.setitem(import_utils.PACKAGE_DISTRIBUTION_MAPPING, "flash_attn", ["flash-attn"])
    import_utils.is_flash_attn_2_available.cache_clear()
    assert import_utils.is_flash_attn_2_available()
    return importlib.import_module("flash_attn")


COMPLETIONS = [[3, 5, 6, 7, 8], [4, 5], [6], [7, 9, 10]]


def rows_and_tree(folder: Path, model: Path, **options: Any) -> tuple[Any, Any, Syncs]:
    """Trainers that have taken a step, by plain rows and by a tree; and how often the host waited in the tree's."""
    eager = {"trainer": {"model_init_kwargs": {"attn_implementation": "eager"}}}
    rows = trainer(folder, model, completions=COMPLETIONS, **(options | eager))
    assert rows.row_passes.kernel is None
    rows.train()
    found, syncs = trainer(folder, model, completions=COMPLETIONS, **options), Syncs()
    found._part_of_loss = syncs.watch(found._part_of_loss)  # type: ignore[method-assign]
    return rows, found, syncs


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_tree_goes_through_flash_attention_where_it_is_installed(
    family: str, tmp_path: Path, model: Model, flash: Any
) -> None:
    """The gradient is that of padded rows; no layer has the host wait."""
    rows, trained, syncs = rows_and_tree(tmp_path, model(family))
    assert trained.row_passes.kernel.name == "FlashAttention (flash-attn)"
    flash.calls.clear()
    trained.train()
    assert not syncs.found
    assert set(flash.calls) == {"flash_attn_varlen_func"}
    assert trained.last.grad_norm == pytest.approx(rows.last.grad_norm, rel=0.05)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_tree_goes_through_flex_attention_without_flash_attention_and_in_float32(
    family: str, checkpointing: bool, tmp_path: Path, model: Model, flash: Any
) -> None:
    options = {"dtype": "float32", "trainer": {"gradient_checkpointing": checkpointing}, "prompt": [5, 9] * 100}
    rows, trained, syncs = rows_and_tree(tmp_path, model(family), **options)
    assert trained.row_passes.kernel.name == "torch's flex_attention"
    flash.calls.clear()
    flex.calls.clear()
    trained.train()
    assert not syncs.found
    assert not flash.calls
    assert {shape[2] for shape in flex.calls} == {200 + 2 * sum(map(len, COMPLETIONS))}, "of two groups of one prompt"
    assert trained.last.loss == pytest.approx(rows.last.loss, rel=1e-4, abs=1e-6)
    assert trained.last.grad_norm == pytest.approx(rows.last.grad_norm, rel=1e-4)


def test_an_older_card_gets_rows(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with caplog.at_level(logging.INFO):
        assert trainer(tmp_path, model("llama")).row_passes.kernel is None
    assert "padded to the longest: no kernel fits the device" in caplog.text


def test_a_kernel_that_fails_on_this_card_is_not_used(
    tmp_path: Path, model: Model, flash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any, **__: Any) -> None:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr(flash, "flash_attn_varlen_func", refusing)
    kernel = trainer(tmp_path, model("llama")).row_passes.kernel
    assert kernel is not None
    assert kernel.name == "torch's flex_attention"


def test_a_share_of_the_gpu_is_a_limit_and_is_held(gpu: Gpu) -> None:
    device = CudaDevice()
    assert device.limit(0.25) == gpu.total_bytes // 4
    anchor = device.reserve(2**20)
    assert 0 < gpu.allocated_bytes < 2**23
    with pytest.raises(torch.OutOfMemoryError):
        device.reserve(gpu.total_bytes // 2)
    del anchor
    assert gpu.allocated_bytes == 0


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> ProcessRanks:
    """The first of two ranks with GPUs. Nobody answers for the other: a fake process group says what rank 0 said."""
    store, init, new_group = FakeStore(), dist.init_process_group, dist.new_group
    monkeypatch.setattr(dist, "init_process_group", lambda _, **options: init("fake", **(options | {"store": store})))
    monkeypatch.setattr(dist, "new_group", lambda *_, **options: new_group([0, 1], **(options | {"backend": "fake"})))
    return ProcessRanks(store, 0, 2, torch.device("cuda"), 60.0)


def test_ranks_add_gradients_on_the_gpu_and_gather_on_the_host(two_ranks: ProcessRanks) -> None:
    assert two_ranks.mesh.device_type == "cuda"
    gradients = [torch.ones(3, device="cuda"), torch.ones(2, 2, device="cuda")]
    two_ranks.add(gradients)
    assert [each.device.type for each in gradients] == ["cuda", "cuda"]
    found = two_ranks.gather({"a": torch.ones(3, device="cuda"), "b": torch.tensor([True], device="cuda")})
    assert {name: each.device.type for name, each in found.items()} == {"a": "cpu", "b": "cpu"}


def test_a_base_is_shared_layer_by_layer(tmp_path: Path, model: Model, two_ranks: ProcessRanks, gpu: Gpu) -> None:
    device = torch.device("cuda", 0)
    made = trainer(tmp_path, model("llama"))
    base = made.base
    whole = gpu.allocated_bytes
    shard_base("layers", base, two_ranks, device)
    assert is_sharded(base)
    assert gpu.allocated_bytes < whole
    logits = base(input_ids=torch.arange(4, device=device)[None]).logits
    assert logits.is_cuda
    logits.float().sum().backward()
    assert {each.grad.device.type for each in base.parameters() if each.requires_grad} == {"cuda"}


def test_a_base_is_shared_when_it_takes_most_of_a_gpu(gpu: Gpu) -> None:
    linear = torch.nn.Linear(64, 64, device="cuda").requires_grad_(False)
    assert not sharding._is_too_large(linear, ALONE, torch.device("cuda"))
    gpu.total_bytes = 20_000
    assert sharding._is_too_large(linear, ALONE, torch.device("cuda"))


def test_the_work_of_a_rank_has_the_memory_of_its_gpu() -> None:
    torch.ones(1000, device="cuda")
    [one] = work.work_of_all(ALONE, 1.0, 0.5, 7)
    assert one.memory_bytes == torch.cuda.max_memory_allocated()
