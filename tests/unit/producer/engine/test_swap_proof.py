"""`producer.engine.swap_proof`: what a slot has to hold, in numbers worked by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from producer.engine.published import Pair, PartlyServedError, PublishedAdapter, read_published
from producer.engine.swap_proof import AdapterProof, by_slice
from tests.unit.producer.engine.lora_layers import DOWN, QKV, K, Q, V, Wrapped, manager_of, write_adapter


@pytest.fixture
def layers() -> dict[str, Any]:
    """q, v and down_proj of rank 1 in slots for rank 2, with a scaling of 2."""
    qkv, down = Wrapped((2, 1, 1), 2), Wrapped((2,), 3)
    qkv.put(0, [[1, 2], [0, 0]], [[2, 0], [6, 0]])
    qkv.put(2, [[3, 4], [0, 0]], [[10, 0]])
    down.put(0, [[1, 0, 2], [0, 0, 0]], [[2, 0], [-4, 0]])
    return {QKV: qkv, DOWN: down}


@pytest.fixture
def published(tmp_path: Path) -> PublishedAdapter:
    pairs: dict[str, Any] = {
        Q: ([[1.0, 2.0]], [[1.0], [3.0]]),
        V: ([[3.0, 4.0]], [[5.0]]),
        DOWN: ([[1.0, 0.0, 2.0]], [[1.0], [-2.0]]),
    }
    return read_published(write_adapter(tmp_path / "v1", pairs), None)


def refusal(layers: dict[str, Any], published: PublishedAdapter, **others: torch.nn.Module) -> str:
    """What the proof says; "" if it refuses nothing."""
    proof = AdapterProof(manager_of(layers, **others))
    try:
        proof.check_modules(published)
        proof.compare(7, published)
    except PartlyServedError as error:
        return str(error)
    return ""


def test_slots_that_hold_the_adapter_pass_and_parts_that_it_lacks_are_zero(layers: Any, published: Any) -> None:
    assert refusal(layers, published) == ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda layers: layers[QKV].lora_b_stacked[0].mul_(0.5), f"{Q} (lora_B)"),
        (lambda layers: layers[QKV].lora_a_stacked[2][1].zero_(), f"{V} (lora_A)"),
        (lambda layers: layers[DOWN].put(0, [[0] * 3] * 2, [[0, 0], [0, 0]]), f"{DOWN} (lora_A), {DOWN} (lora_B)"),
        (lambda layers: layers[DOWN].put(0, [[2, 0, 1], [0, 0, 0]], [[2, 0], [-4, 0]]), f"{DOWN} (lora_A)"),
        (lambda layers: layers[DOWN].put(0, [[1, 0, 2], [0, 0, 1e-30]], [[2, 0], [-4, 0]]), f"{DOWN} (lora_A)"),
        (lambda layers: layers[QKV].put(1, [[0, 1e-30], [0, 0]], [[0, 0]]), f"{K} (lora_A)"),
        (lambda layers: layers[DOWN].lora_b_stacked[0].nextafter_(torch.tensor(9.0)), f"{DOWN} (lora_B)"),
        (lambda layers: layers[DOWN].lora_b_stacked[0].fill_(float("nan")), f"{DOWN} (lora_B)"),
    ],
    ids=["alpha halved", "a matrix is missing", "a module is missing", "numbers in other places", "beside the matrix",
         "a part that is not in the adapter", "the last bit", "NaN"],
)  # fmt: skip
def test_any_other_number_is_refused_by_the_name_of_its_module(
    layers: Any, published: Any, change: Any, named: str
) -> None:
    change(layers)
    assert refusal(layers, published) == (
        f"the engine holds other numbers than were published for {named}; it would not sample from this policy"
    )


def test_an_adapter_that_is_in_no_slot_is_refused(layers: Any, published: Any) -> None:
    proof = AdapterProof(manager_of(layers))
    with pytest.raises(PartlyServedError, match="none of its slots has it"):
        proof.compare(8, published)


def test_numbers_are_cast_before_they_are_scaled_and_rounded_once_each(tmp_path: Path) -> None:
    """bfloat16 has steps of 2**-7 above 1: B becomes 1 + 2**-7, and 1.5 times that is between two steps, of which 194 is even."""
    layer = Wrapped((1,), 1, torch.bfloat16)
    pair = ([[1.0 + 2.0**-12]], [[1.0 + 2.0**-7 + 2.0**-12]])
    published = read_published(write_adapter(tmp_path / "v1", {DOWN: pair}, lora_alpha=1.5), None)
    layer.put(0, [[1], [0]], [[194 / 128, 0]])
    assert refusal({DOWN: layer}, published) == ""
    layer.put(0, [[1], [0]], [[193 / 128, 0]])
    assert "down_proj (lora_B)" in refusal({DOWN: layer}, published)


class SecondOfTwo(torch.nn.Module):
    """The base of a layer on the second of two workers: it takes the second half."""

    def weight_loader(self, param: Any, loaded: torch.Tensor, shard: Any = None) -> None:
        dim = 1 if hasattr(param, "input_dim") else param.output_dim
        half = loaded.shape[dim] // 2
        start = 0 if shard is None else 2 * shard  # of fused layers, whose shards have two rows here
        param.data.narrow(dim, start, half).copy_(loaded.narrow(dim, half, half))


def test_a_worker_of_several_holds_its_own_part(tmp_path: Path) -> None:
    fused, row = Wrapped((2, 2), 2), Wrapped((2,), 1)
    names = [f"model.layers.0.mlp.{each}_proj" for each in ("gate", "up")]
    layers = {"model.layers.0.mlp.gate_up_proj": fused, DOWN: row}
    for layer in layers.values():
        layer.base_layer, layer.tp_rank = SecondOfTwo(), 1
    manager = manager_of(layers)
    manager.packed_modules = {"model.layers.0.mlp.gate_up_proj": names}
    up = [[1.0], [2.0], [3.0], [4.0]]
    pairs: Any = {names[0]: ([[1.0, 2.0]], up), names[1]: ([[3.0, 4.0]], up), DOWN: ([[5.0, 6.0]], [[1.0], [2.0]])}
    published = read_published(write_adapter(tmp_path / "v1", pairs, lora_alpha=1), None)
    fused.put(0, [[1, 2], [0, 0]], [[3, 0], [4, 0]])
    fused.put(1, [[3, 4], [0, 0]], [[3, 0], [4, 0]])
    row.put(0, [[6], [0]], [[1, 0], [2, 0]])
    AdapterProof(manager).compare(7, published)
    fused.put(1, [[3, 4], [0, 0]], [[1, 0], [2, 0]])
    row.put(0, [[5], [0]], [[1, 0], [2, 0]])
    with pytest.raises(PartlyServedError, match=r"down_proj \(lora_A\), .*up_proj \(lora_B\);"):
        AdapterProof(manager).compare(7, published)


def test_of_what_vllm_splits_for_adapters_alone_a_worker_holds_its_part() -> None:
    """`fully_sharded_loras`: of rank 4 the second of two workers holds rows 2 and 3 of A, and its half of the outputs."""
    row = Wrapped((2,), 3)
    row.tp_rank = 1
    pair = Pair(torch.arange(12.0).view(4, 3), torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]), 1.0)
    row.base_layer.weight_loader = lambda param, up, **_: param.data.copy_(up[2:])
    row.put(0, [[6, 7, 8], [9, 10, 11]], [[5, 6], [7, 8]])
    AdapterProof(manager_of({DOWN: row})).compare(7, PublishedAdapter({DOWN: pair}, {}))


@pytest.mark.parametrize("module", ["model.layers.0.block_sparse_moe.gate", "lm_head", "model.layers.1.mlp.down_proj"])
def test_a_module_without_a_place_is_refused_unless_another_worker_has_its_layer(
    layers: Any, published: Any, module: str
) -> None:
    published.pairs[module] = published.pairs[DOWN]
    assert (
        refusal(layers, published) == f"vLLM serves no adapter of {module}; check lora.target_modules of the producer"
    )
    elsewhere = type("PPMissingLayer", (torch.nn.Module,), {})()
    said = refusal(layers, published, model__layers__1=elsewhere)
    assert (module in said) == ("layers.1" not in module)


def test_a_layer_that_the_model_computes_without_its_adapter_is_refused(layers: Any, published: Any) -> None:
    assert refusal(layers, published, runner__down_proj=layers[DOWN]) == "", "another name of the same layer"
    said = refusal(layers, published, runner__gate=layers[DOWN].base_layer)
    assert said == f"vLLM computes {DOWN} without an adapter; take it out of lora.target_modules"
    manager = manager_of(layers)
    manager.model.model.layers.get_submodule("0").mlp.down_proj = torch.nn.Module()
    with pytest.raises(PartlyServedError, match=f"computes {DOWN} without"):
        AdapterProof(manager).check_modules(published)


def test_a_published_adapter_without_a_kind_that_it_targets_is_refused(layers: Any, published: Any) -> None:
    published.config["target_modules"] = ["q_proj", "k_proj", "v_proj", "down_proj", "o_proj"]
    assert "targets k_proj and has no such module" in refusal(layers, published)
    for reason in ("target_parameters", "exclude_modules", "layers_to_transform"):
        assert refusal(layers, published._replace(config=published.config | {reason: ["k_proj"]})) == ""


def test_a_part_of_several_slices_is_split_by_their_outputs() -> None:
    pair = Pair(torch.ones(1, 1), torch.arange(5.0)[:, None], 1.0)
    found = list(by_slice([("qkv", pair), ("z", None)], [2, 1, 2, 4]))
    assert [(name, each and each.up.flatten().tolist()) for name, each in found] == [
        ("qkv", [0, 1]), ("qkv", [2]), ("qkv", [3, 4]), ("z", None)
    ]  # fmt: skip


def test_vllms_own_names_of_modules_are_used(layers: Any, published: Any) -> None:
    class Mapper:
        def get_rename_mapper(self) -> "Mapper":
            return self

        def apply_list(self, names: list[str]) -> list[str]:
            return [name.replace("language_model.", "model.") for name in names]

    pairs = {name.replace("model.", "language_model."): pair for name, pair in published.pairs.items()}
    manager = manager_of(layers)
    manager.model.hf_to_vllm_mapper = Mapper()
    proof = AdapterProof(manager)
    proof.check_modules(published._replace(pairs=pairs))
    proof.compare(7, published._replace(pairs=pairs))
