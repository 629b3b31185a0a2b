"""Patches of weights that are on the stand-in GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from producer.engine import patch_worker
from producer.engine.patch_worker import Patcher
from tests.unit.producer.engine.patched_models import checkpoint, loaded, values, write
from tests.unit.producer.engine.test_patching import (
    BF16,
    FIRST,
    SECOND,
    ended,
    patch,
    patcher,
    prepare,
    published,
    swap,
)
from tests.weight_patches import patch_between

pytestmark = pytest.mark.stand_in


def test_patches_are_written_on_their_gpu_in_place_and_taken_back(tmp_path: Path) -> None:
    model = loaded(checkpoint()).cuda()
    patching = patcher(tmp_path, model)
    memory = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    wanted = [values(loaded(state)) for state in (checkpoint(), FIRST, SECOND)]
    first, second = (published(tmp_path / str(number), patch(state)) for number, state in ((1, FIRST), (2, SECOND)))
    swap(patching, *first)
    assert values(model) == wanted[1]
    swap(patching, *second)
    assert values(model) == wanted[2]
    swap(patching, None)
    assert values(model) == wanted[1]
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == memory
    assert all(parameter.is_cuda for parameter in model.parameters())


def test_nothing_changes_on_a_gpu_before_the_flip_and_what_changes_otherwise_is_refused(tmp_path: Path) -> None:
    model = loaded(checkpoint()).cuda()
    patching = patcher(tmp_path, model)
    assert prepare(patching, *published(tmp_path / "1", patch(FIRST)))[0] == "done"
    assert values(model) == values(loaded(checkpoint()))
    patching.flip()
    patching.prove()
    assert ended(patching)[0] == "done"
    model.o.weight.data[0, 0] = 9
    patching.prove()
    assert "the weights of o.weight are not" in ended(patching)[1]


def test_a_gpu_without_room_for_a_patch_has_room_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(checkpoint()).cuda()
    patching = patcher(tmp_path, model)
    first = published(tmp_path / "1", patch(FIRST))

    def full(*_: Any) -> Any:
        torch.empty(2**50, device="cuda")

    with monkeypatch.context() as patched:
        patched.setattr(patch_worker, "writer", full)
        assert prepare(patching, *first)[0] == "failed"
    swap(patching, *first)
    assert values(model) == values(loaded(FIRST))


class Wide(torch.nn.Module):
    """A model of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(256, 256, dtype=BF16), requires_grad=False)

    def load_weights(self, tensors: Any) -> None:
        for _, whole in tensors:
            self.weight.data.copy_(whole)


def test_a_patch_of_all_weights_takes_no_more_than_a_copy_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_worker, "_CHANGES", 1000)
    model = Wide().cuda()
    states = [{"weight": (torch.arange(256.0 * 256).view(256, 256) % 100 + step).to(BF16)} for step in (2, 3)]
    base = {"weight": torch.ones(256, 256, dtype=BF16)}
    patching = Patcher(model, write(tmp_path / "base", base), BF16)
    for number, state in enumerate(states):
        before = torch.cuda.memory_allocated()
        assert prepare(patching, *published(tmp_path / str(number), patch_between(base, state)))[0] == "done"
        assert torch.cuda.memory_allocated() - before <= model.weight.nbytes
        patching.flip()
        patching.prove()
        assert ended(patching)[0] == "done"
        assert torch.equal(model.weight.cpu(), state["weight"])
