"""Patches that a trainer publishes of its own weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from consumer.link.weight_snapshots import WeightSnapshots, check_names
from protocol.errors import ConfigError
from protocol.wire.weight_patch import WeightPatch, parse


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.second = torch.nn.Parameter(torch.full((5,), 0.5))
        self.fixed = torch.nn.Parameter(torch.ones(3), requires_grad=False)


def numbers(low: bytes, high: bytes) -> list[int]:
    return [first + 256 * second for first, second in zip(low, high, strict=True)]


def published(snapshots: WeightSnapshots) -> WeightPatch:
    return parse(snapshots.take().published(1).data)


def test_a_patch_by_hand() -> None:
    """In bfloat16 1 is 0x3F80, 2 is 0x4000, 4 is 0x4080, 5 is 0x40A0, 0.5 is 0x3F00 and -0.5 is 0xBF00."""
    model = Model()
    snapshots = WeightSnapshots(model)
    with torch.no_grad():
        model.first[1, 1] = 5.0  # in place of 4: element 4
        model.second[0] = -0.5
        model.second[3] = 1.0
    patch = published(snapshots)
    assert patch.anchor == ""
    assert [(each.name, each.shape, each.num_changes, each.num_gaps) for each in patch.tensors] == [
        ("first", [2, 3], 1, 1),
        ("second", [5], 2, 2),
    ]
    assert patch.tensors[0].sum == 0x0000 + 0x3F80 + 0x4000 + 0x4040 + 0x40A0 + 0x40A0
    assert patch.tensors[1].sum == 0xBF00 + 3 * 0x3F00 + 0x3F80
    assert numbers(*patch.streams[:2]) == [4, 0, 2]
    assert numbers(*patch.streams[2:]) == [0x4080 ^ 0x40A0, 0x8000, 0x3F00 ^ 0x3F80]


def test_weights_that_round_to_the_same_make_an_empty_patch_and_equal_weights_equal_ones() -> None:
    model = Model()
    snapshots = WeightSnapshots(model)
    with torch.no_grad():
        model.first += 1e-4 * model.first
    assert published(snapshots).tensors == []
    with torch.no_grad():
        model.first *= 2
        once = snapshots.take().published(7)
        model.first *= 2
        between = snapshots.take().published(8)
        model.first /= 2
    again = snapshots.take().published(9)
    assert once.digest == again.digest != between.digest
    assert bytes(once.data) == bytes(again.data)


def test_training_goes_on_while_a_snapshot_waits() -> None:
    model = Model()
    snapshots = WeightSnapshots(model)
    with torch.no_grad():
        model.second[1] = 2.0
        waiting = snapshots.take()
        model.second[1] = 4.0
        newer = snapshots.take()
    of_waiting, of_newer = (parse(each.published(1).data) for each in (waiting, newer))
    assert numbers(*of_waiting.streams[2:]) == [0x3F00 ^ 0x4000]
    assert numbers(*of_newer.streams[2:]) == [0x3F00 ^ 0x4080]


@pytest.mark.parametrize(("change", "named"), [({"second": torch.ones(4)}, "second"), ({"first": None}, "first")])
def test_parameters_that_the_checkpoint_does_not_have_are_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    tensors = {name: each.detach().clone() for name, each in Model().named_parameters()} | change
    save_file({name: each for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"lora: null: .*{named}"):
        check_names(Model(), tmp_path)
    del tensors["fixed"]  # which does not train
    tensors |= {name: each.detach().clone() for name, each in Model().named_parameters() if name != "fixed"}
    save_file(tensors, tmp_path / "model.safetensors")
    check_names(Model(), tmp_path)
