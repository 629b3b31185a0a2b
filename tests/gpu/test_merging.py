"""Policies merged into weights that are on the stand-in GPU."""

from pathlib import Path

import pytest
import torch

from producer.engine import merged_worker as merging
from producer.engine.merged_worker import Merger
from tests.unit.producer.engine.test_merging import adapter, engine_model, swap

pytestmark = pytest.mark.stand_in


def test_weights_are_merged_on_their_gpu_from_a_pinned_base_and_come_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(merging._BLOCK, "cuda", 4)  # two rows at a time
    model = engine_model(torch.bfloat16).cuda()
    merged = Merger(model)
    swap(merged, adapter(tmp_path / "1", "attn.k_proj", "attn.o_proj", "attn.v_proj", "mlp.up_proj"))
    assert model.attn.qkv_proj.weight.tolist() == [[1, 1], [1, 1], [3, 5], [7, 13], [7, 13], [19, 37]]
    assert model.attn.o_proj.weight.tolist() == [[5, 9], [13, 25]]
    assert model.mlp.gate_up_proj.weight.tolist() == [[1, 1], [1, 1], [9, 17], [25, 49]]
    swap(merged, None)
    assert {
        value for name in ("qkv_proj", "o_proj") for value in getattr(model.attn, name).weight.unique().tolist()
    } == {1}
    for tensors in (merged._bases, merged._buffers):
        assert len(tensors) == 3
        assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors.values())


def test_a_gpu_without_room_for_a_merge_has_room_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine_model().cuda()
    merged = Merger(model)
    swap(merged, adapter(tmp_path / "1", "attn.o_proj"))
    second = adapter(tmp_path / "2", "attn.o_proj", config={"lora_alpha": 4})
    with monkeypatch.context() as full:
        full.setattr(merging, "merge", _out_of_memory)
        merged.prepare(second)
        assert merged.thread is not None
        merged.thread.join()
    assert merged.state[0] == "failed"
    assert model.attn.o_proj.weight.tolist() == [[3, 5], [7, 13]]
    swap(merged, second)
    assert model.attn.o_proj.weight.tolist() == [[5, 9], [13, 25]]


def _out_of_memory(*_: object) -> None:
    torch.empty(2**50, device="cuda")
