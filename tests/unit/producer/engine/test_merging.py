"""Weights after a merge, in numbers worked by hand, with stand-ins for vLLM's layers."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from producer.engine.merged_worker import _BLOCK, Merger, factors, merge
from producer.engine.packed_layers import unpacked
from producer.engine.published import Part


class Fused(torch.nn.Module):
    """Loads its shards one above the other, as vLLM's fused layers do, and keeps two rows each."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.input_size = weight.shape[1]

    def weight_loader(self, param, loaded, shard=None):
        start, rows = (
            (0, len(param)) if shard is None else (2 * "qkv".index(shard) if shard in ("q", "k", "v") else 2 * shard, 2)
        )
        assert loaded.shape == (rows, param.shape[1])
        param.data[start : start + rows].copy_(loaded)


class Attention(Fused):
    total_num_kv_heads = 1


def engine_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = torch.nn.Module()
    model.attn, model.mlp = torch.nn.Module(), torch.nn.Module()
    model.attn.qkv_proj = Attention(torch.ones(6, 2, dtype=dtype))
    model.attn.o_proj = Fused(torch.ones(2, 2, dtype=dtype))
    model.mlp.gate_up_proj = Fused(torch.ones(4, 2, dtype=dtype))
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    return model


def adapter(folder: Path, *modules: str, config: dict | None = None, **extra: torch.Tensor) -> Path:
    """Module number i gets B @ A = [[i, 2 i], [3 i, 6 i]] and a scaling of 2."""
    folder.mkdir()
    tensors = dict(extra)
    for number, module in enumerate(modules, 1):
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.tensor([[1.0, 2.0]])
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.tensor([[1.0], [3.0]]) * number
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2} | (config or {})))
    return folder


def swap(merging: Merger, folder: Path | None) -> None:
    prepare(merging, folder)
    assert merging.state == ("done", "" if folder is None else str(folder))
    merging.flip()


def prepare(merging: Merger, folder: Path | None) -> None:
    merging.prepare(folder)
    if merging.thread is not None:
        merging.thread.join()


def test_each_shard_is_added_to_its_own_rows_of_a_fused_layer(tmp_path):
    model = engine_model()
    names = ("attn.k_proj", "attn.o_proj", "attn.v_proj", "mlp.up_proj")
    swap(Merger(model), adapter(tmp_path / "a", *names))
    assert model.attn.qkv_proj.weight.tolist() == [[1, 1], [1, 1], [3, 5], [7, 13], [7, 13], [19, 37]]
    assert model.attn.o_proj.weight.tolist() == [[5, 9], [13, 25]]
    assert model.mlp.gate_up_proj.weight.tolist() == [[1, 1], [1, 1], [9, 17], [25, 49]]


@pytest.mark.long
def test_swaps_leave_no_trace(tmp_path):
    torch.manual_seed(0)
    model = engine_model(torch.bfloat16)
    model.attn.o_proj.weight.data = torch.randn(2, 2).to(torch.bfloat16)
    base = model.attn.o_proj.weight.clone()
    one = adapter(tmp_path / "1", "attn.o_proj")
    two = adapter(tmp_path / "2", "attn.o_proj", config={"lora_alpha": 0.37})
    merging = Merger(model)
    swap(merging, one)
    after_one = model.attn.o_proj.weight.clone()
    assert not torch.equal(after_one, base)
    swap(merging, two)
    for _ in range(99):
        swap(merging, None)  # back to the one before, again and again
    assert torch.equal(model.attn.o_proj.weight, after_one)
    swap(merging, two)
    swap(merging, one)
    assert torch.equal(model.attn.o_proj.weight, after_one)


def test_before_the_first_adapter_there_is_the_base_and_what_an_adapter_leaves_out_returns_to_it(tmp_path):
    model = engine_model()
    merging = Merger(model)
    swap(merging, adapter(tmp_path / "1", "attn.o_proj"))
    swap(merging, None)
    assert model.attn.o_proj.weight.tolist() == [[1, 1], [1, 1]]
    swap(merging, adapter(tmp_path / "2", "attn.o_proj", "mlp.up_proj"))
    swap(merging, adapter(tmp_path / "3", "mlp.up_proj"))
    assert model.attn.o_proj.weight.tolist() == [[1, 1], [1, 1]]
    assert model.mlp.gate_up_proj.weight[2].tolist() == [3, 5]


def test_the_sum_is_rounded_once():
    def merged(difference: float) -> float:
        base = torch.ones(1, 1, dtype=torch.bfloat16)  # whose neighbours are 1 - 2**-8 and 1 + 2**-7
        out = torch.empty_like(base)
        merge(base, torch.tensor([[difference]]), torch.ones(1, 1), out, torch.device("cpu"))
        return out.item()

    assert merged(2.0**-8) == 1.0, "a tie goes to the even one"
    assert merged(2.0**-8 + 2.0**-20) == 1 + 2.0**-7


@pytest.mark.parametrize("block", [1, 7, 12, 100])
def test_a_layer_is_merged_block_by_block_of_rows(monkeypatch, block):
    monkeypatch.setitem(_BLOCK, "cpu", block)
    base, up, down, out = (
        torch.ones(5, 4),
        torch.arange(10.0).view(5, 2),
        torch.arange(8.0).view(2, 4),
        torch.zeros(5, 4),
    )
    merge(base, up, down, out, torch.device("cpu"))
    assert torch.equal(out, base + up @ down)


class Split:
    """Takes its half of outputs or inputs, as a layer of the second of two workers does."""

    input_size = 4

    def weight_loader(self, param, loaded):
        for name in ("output_dim", "input_dim"):
            if (dim := getattr(param, name, None)) is not None and loaded.shape[dim] != param.shape[dim]:
                loaded = loaded.narrow(dim, param.shape[dim], param.shape[dim])
        assert loaded.shape == param.shape
        param.data.copy_(loaded)


@pytest.mark.parametrize(
    ("shape", "rows", "columns"), [((3, 4), slice(3, 6), slice(4)), ((6, 2), slice(6), slice(2, 4))]
)
def test_a_worker_multiplies_its_own_part_of_a_layer_alone(shape, rows, columns):
    up, down = torch.arange(12.0).view(6, 2), torch.arange(8.0).view(2, 4)
    mine, inputs = factors(Split(), torch.Size(shape), [Part("o_proj", "layer", None, down, up, 0.5)])
    assert (mine.shape, inputs.shape) == ((shape[0], 2), (2, shape[1]))
    assert torch.equal(mine @ inputs, (0.5 * up @ down)[rows, columns])


O_PROJ = "base_model.model.attn.o_proj"


@pytest.mark.parametrize(
    ("modules", "extra", "said"),
    [
        (("attn.o_proj", "attn.rotary"), {}, "attn.rotary is no linear layer of the engine"),
        (("mlp.gate_up_proj.base",), {}, "mlp.gate_up_proj.base is no linear layer"),
        (("attn.o_proj",), {"base_model.model.embed.lora_embedding_A": (1,)}, "embed.lora_embedding_A: not a pair"),
        (("attn.o_proj",), {"base_model.model.attn.k_proj.lora_A.weight": (1, 2)}, "k_proj.lora_A.weight: not a pair"),
        ((), {}, "the adapter is empty"),
        (
            ("mlp.up_proj",),
            {f"{O_PROJ}.lora_A.weight": (1, 3), f"{O_PROJ}.lora_B.weight": (2, 1)},
            "takes 3 inputs, its layer in the engine 2",
        ),
        (("lm_head",), {}, "lm_head shares its weight with another layer"),
        (None, {}, "adapter_model.safetensors"),
    ],
)
def test_an_adapter_that_would_be_served_in_part_is_refused(tmp_path, modules, extra, said):
    model = engine_model()
    model.lm_head, model.embed = Fused(torch.ones(2, 2)), torch.nn.Module()
    model.embed.weight = model.lm_head.weight
    merging, folder = Merger(model), tmp_path
    if modules is not None:
        tensors = {name: torch.ones(shape) for name, shape in extra.items()}
        folder = adapter(tmp_path / "a", *modules, **tensors)
    prepare(merging, folder)
    assert merging.state[0] == ("failed" if modules is None else "refused")
    assert said in merging.state[1]
    merging.flip()
    assert model.attn.o_proj.weight.tolist() == [[1, 1], [1, 1]]


def test_the_weights_of_a_packed_layer_are_what_it_makes_of_unit_vectors():
    weight = torch.randn(3, 1500)
    layer = SimpleNamespace(weight=torch.empty(0), input_size=1500)
    layer.quant_method = SimpleNamespace(apply=lambda layer, rows, bias: rows @ weight.t())
    assert torch.equal(unpacked(layer), weight)
