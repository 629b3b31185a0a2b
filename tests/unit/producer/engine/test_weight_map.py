"""Maps of checkpoints by the loaders of models, in numbers worked by hand, and models that are refused."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.engine.exchange_worker import UnmappedError
from producer.engine.weight_map import Block, Checkpoint, Dimension, block_of, blocks_of, read_back
from tests.unit.producer.engine.patched_models import Model, checkpoint, loaded, write

BF16 = torch.bfloat16
SHAPES = {name: tuple(tensor.shape) for name, tensor in checkpoint().items()}


def test_the_map_by_hand() -> None:
    blocks = blocks_of(Model(rank=1), SHAPES, BF16)
    assert blocks == {
        "embed.weight": [Block("embed.weight", 0, 0, (Dimension(6, 1, 1),))],
        "q.weight": [Block("qk.weight", 0, 0, (Dimension(2, 1, 1),))],
        "k.weight": [Block("qk.weight", 0, 2, (Dimension(4, 1, 1),))],
        "o.weight": [Block("o.weight", 2, 0, (Dimension(2, 4, 2), Dimension(2, 1, 1)))],
        "norm.weight": [Block("norm.weight", 0, 0, (Dimension(2, 1, 1),))],
    }


def places(block: Block, *elements: int) -> tuple[list[int], list[int]]:
    """Return the elements that lie in the block, and their places."""
    asked = np.array(elements, np.int64)
    kept, found = block.places(asked)
    return asked[kept].tolist(), found.tolist()


def test_places_by_hand() -> None:
    right = Block("o", 2, 0, (Dimension(2, 4, 2), Dimension(2, 1, 1)))  # columns 2 and 3 of four
    assert places(right, *range(8)) == ([2, 3, 6, 7], [0, 1, 2, 3])
    assert places(right, 1, 3, 4, 6) == ([3, 6], [1, 2])
    rows = Block("qk", 0, 2, (Dimension(4, 1, 1),))
    assert places(rows, 0, 3) == ([0, 3], [2, 5])
    assert places(Block("qk", 4, 1, (Dimension(2, 1, 1),)), 3, 4, 5, 6) == ([4, 5], [1, 2])
    turned = Block("o", 0, 0, (Dimension(2, 2, 1), Dimension(2, 1, 2)))
    assert places(turned, 0, 1, 2, 3) == ([0, 1, 2, 3], [0, 2, 1, 3])
    assert places(Block("one", 3, 5, ()), 2, 3, 4) == ([3], [5])
    assert places(right) == ([], [])


@pytest.mark.long
@settings(max_examples=60)
@given(st.data())
def test_a_block_has_the_places_that_a_copy_fills(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    source = torch.arange(1, 1 + int(np.prod(shape))).view(shape)
    whole = source
    for dimension, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        source = source.narrow(dimension, start, draw(st.integers(1, size - start)))
    source = source.permute(draw(st.permutations(range(len(shape)))))
    parameter = torch.zeros([size + 1 for size in source.shape], dtype=torch.int64)
    target = parameter
    for dimension, size in enumerate(source.shape):
        target = target.narrow(dimension, draw(st.integers(0, 1)), size)
    target.copy_(source)
    block = block_of("p", source, target, 0)
    assert block is not None
    elements = sorted(draw(st.sets(st.integers(0, whole.numel() - 1))))
    kept, found = places(block, *elements)
    flat = parameter.view(-1).tolist()
    expected = [element for element in elements if element + 1 in flat]
    assert kept == expected
    assert [flat[place] - 1 for place in found] == expected
    assert torch.equal(block.source_view(whole.view(-1)), block.target_view(parameter.view(-1)))


def test_what_is_copied_more_than_once_has_no_block() -> None:
    whole = torch.zeros(2, 2)
    assert block_of("p", whole[:1].expand(3, 2), torch.zeros(3, 2), 0) is None
    assert block_of("p", whole.as_strided((3, 2), (1, 1)), torch.zeros(3, 2), 0) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_has_the_checkpoint_is_read_back(tmp_path: Path, rank: int) -> None:
    model = loaded(checkpoint(), rank)
    before = {name: each.clone() for name, each in model.named_parameters()}
    sums = read_back(model, Checkpoint(write(tmp_path, checkpoint()), BF16), blocks_of(model, SHAPES, BF16))
    assert sums["norm.weight"] == 2 * 0x3F80
    columns = [[0x3F80, 0x4000, 0x40A0, 0x40C0], [0x4040, 0x4080, 0x40E0, 0x4100]]  # 1 2 5 6, 3 4 7 8
    assert sums["o.weight"] == sum(columns[rank])
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())


def test_a_checkpoint_in_float32_is_rounded_as_the_trainer_rounds_it(tmp_path: Path) -> None:
    state = checkpoint(norm_weight=torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8]))  # ties, to even: 1 and 1 + 2^-6
    files = Checkpoint(write(tmp_path, state, torch.float32), BF16)
    assert files.bits("norm.weight", np.array([1, 0])).tolist() == [0x3F82, 0x3F80]
    assert files.sum("norm.weight") == 0x3F82 + 0x3F80
    assert files.shapes == SHAPES
    model = loaded(state)
    read_back(model, files, blocks_of(model, SHAPES, BF16))


def test_what_sees_images_is_not_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, checkpoint() | {"vision_tower.patch.weight": torch.ones(2)})
    assert "vision_tower.patch.weight" not in Checkpoint(tmp_path, BF16).shapes


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("norm.weight", lambda model, whole: model.norm.weight.data.copy_(torch.empty(2, device="meta"))),
        ("norm.weight", lambda model, whole: model.norm.weight.data.fill_(whole[0].item())),
        ("norm.weight", lambda model, whole: model.norm.weight.data.__setitem__(slice(None), whole)),
        ("norm.weight", lambda model, whole: torch.zeros(2).copy_(whole)),
        ("norm.weight", lambda model, whole: model.norm.weight.data.copy_(whole[:1])),
        ("q.weight", lambda model, whole: model.qk.weight.data.copy_(whole.expand(3, 2))),
    ],
)
def test_a_loader_that_does_not_copy_a_tensor_as_it_is_is_refused_by_its_name(name: str, load: Any) -> None:
    model = loaded(checkpoint())
    model.loads[name] = lambda whole: load(model, whole)
    copy = torch.Tensor.copy_
    with pytest.raises(UnmappedError, match=name):
        blocks_of(model, SHAPES, BF16)
    assert torch.Tensor.copy_ is copy
    assert "copy_" not in vars(torch.Tensor)
    assert model.norm.weight.tolist() == [1, 1]


def test_copies_of_other_threads_are_made_meanwhile() -> None:
    model, target = loaded(checkpoint()), torch.zeros(2)

    def load(whole: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: target.copy_(torch.ones(2)))
        thread.start()
        thread.join()

    model.loads["norm.weight"] = load
    assert "norm.weight" not in blocks_of(model, SHAPES, BF16)
    assert target.tolist() == [1, 1]


def test_two_parameters_in_one_memory_are_refused() -> None:
    model = loaded(checkpoint())
    both = torch.zeros(4, dtype=BF16)
    model.norm.weight.data, model.norm.bias = both[:2], torch.nn.Parameter(both[2:], requires_grad=False)
    with pytest.raises(UnmappedError, match=r"norm\.bias of the engine lies in the memory of norm\.weight"):
        blocks_of(model, SHAPES, BF16)


def swap_rows(model: Model) -> None:
    model.qk.weight.data.copy_(model.qk.weight.flip(0))


def change_a_bit(model: Model) -> None:
    model.o.weight.data[1, 1] = 6.03125


def fill_the_padding(model: Model) -> None:
    model.embed.weight.data[3, 1] = 1


def add_a_bias(model: Model) -> None:
    model.norm.bias = torch.nn.Parameter(torch.ones(2, dtype=BF16))


def transpose(model: Model) -> None:
    model.o.weight.data = model.o.weight.data.t()


def quantize(model: Model) -> None:
    model.o.weight.data = model.o.weight.data.to(torch.int8)


def hold_more_than_the_checkpoint(model: Model) -> None:
    model.norm.weight.data = torch.tensor([1.0, 1.0 + 2.0**-20])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (swap_rows, r"qk\.weight of the engine is not [qk]\.weight"),
        (change_a_bit, r"o\.weight of the engine is not o\.weight"),
        (fill_the_padding, r"embed\.weight of the engine comes from no tensor"),
        (add_a_bias, r"norm\.bias of the engine comes from no tensor"),
        (transpose, r"o\.weight of the engine"),
        (quantize, r"o\.weight of the engine is laid out otherwise"),
        (hold_more_than_the_checkpoint, r"norm\.weight of the engine is not norm\.weight"),
    ],
)
def test_a_model_that_has_other_weights_is_refused_by_the_name_of_a_parameter(
    tmp_path: Path, change: Any, named: str
) -> None:
    model = loaded(checkpoint())
    change(model)
    files = Checkpoint(write(tmp_path, checkpoint()), BF16)
    with pytest.raises(UnmappedError, match=named):
        read_back(model, files, blocks_of(model, SHAPES, BF16))


def test_a_folder_without_weights_and_an_engine_of_other_elements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnmappedError, match=r"no weights in \*\.safetensors"):
        Checkpoint(tmp_path, BF16)
    with pytest.raises(UnmappedError, match="16 bits"):
        Checkpoint(write(tmp_path, checkpoint()), torch.float32)
