"""Weights after patches, in numbers worked by hand, with a stand-in for vLLM's model."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from producer.engine.exchange_worker import UnmappedError
from producer.engine.patch_worker import Patcher
from protocol.wire.adapter_blob import Anchor
from protocol.wire.weight_patch import ANCHOR_FILE, GO_ON, PatchedTensor, WeightPatch, pack, unpack
from tests.unit.producer.engine.patched_models import Model, State, checkpoint, loaded, values, write
from tests.weight_patches import patch_between

BF16 = torch.bfloat16
FIRST = checkpoint(
    embed_weight=torch.tensor([[1.0, 2], [3, -4], [5, 6]]),
    k_weight=torch.tensor([[3.0, 4], [0, 6]]),
    o_weight=torch.tensor([[1.0, 9, 3, 4], [5, 6, 7, 1]]),
)
SECOND = checkpoint(
    embed_weight=torch.tensor([[1.0, 2], [3, 8], [5, 6]]),
    q_weight=torch.tensor([[-1.0, 2]]),
    norm_weight=torch.tensor([1.0, 1.0078125]),
)


def bfloat16(state: State) -> State:
    return {name: tensor.to(BF16) for name, tensor in state.items()}


def patch(new: State, old: State | None = None) -> WeightPatch:
    return patch_between(bfloat16(checkpoint() if old is None else old), bfloat16(new))


def published(folder: Path, patch: WeightPatch, anchor: WeightPatch | None = None) -> tuple[Path, int]:
    if anchor is None:
        return folder, unpack(*pack(patch), folder)
    data, digest = pack(anchor)
    return folder, unpack(*pack(patch._replace(anchor=digest)), folder, Anchor(digest, data))


def patcher(folder: Path, model: Model) -> Patcher:
    return Patcher(model, write(folder / "base", checkpoint()), BF16)


def prepare(patching: Patcher, folder: Path | None, checksum: int | None = None) -> tuple[str, str]:
    patching.prepare(folder, checksum)
    return ended(patching)


def ended(patching: Patcher) -> tuple[str, str]:
    assert patching.thread is not None
    patching.thread.join()
    return patching.state


def swap(patching: Patcher, folder: Path | None, checksum: int | None = None) -> None:
    done = ("done", "" if folder is None else str(folder))
    assert prepare(patching, folder, checksum) == done
    patching.flip()
    patching.prove()
    assert ended(patching) == done
    assert patching.survival == {}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_each_worker_changes_its_own_part(tmp_path: Path, rank: int, packed: bool) -> None:
    model = loaded(checkpoint(), rank)
    patching = patcher(tmp_path, model.packed() if packed else model)
    swap(patching, *published(tmp_path / "1", patch(FIRST)))
    assert values(model) == {
        "embed.weight": [[1, 2], [3, -4], [5, 6], [0, 0]],
        "qk.weight": [[1, 2], [3, 4], [0, 6]],
        "o.weight": [[[1, 9], [5, 6]], [[3, 4], [7, 1]]][rank],
        "norm.weight": [1, 1],
    }
    assert model.head.weight is model.embed.weight
    swap(patching, *published(tmp_path / "2", patch(SECOND)))
    assert values(model) == {
        "embed.weight": [[1, 2], [3, 8], [5, 6], [0, 0]],
        "qk.weight": [[-1, 2], [3, 4], [5, 6]],
        "o.weight": [[[1, 2], [5, 6]], [[3, 4], [7, 8]]][rank],
        "norm.weight": [1, 1.0078125],
    }
    if packed:
        unit = torch.eye(2, dtype=BF16)
        for layer in (model.head, model.qk, model.o):
            assert layer.cpu_linear(unit).t().tolist() == layer.weight.tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_every_version_is_reached_from_every_other_and_the_way_back_leads_to_the_former_bits(
    tmp_path: Path, packed: bool
) -> None:
    model = loaded(checkpoint())
    patching = patcher(tmp_path, model.packed() if packed else model)
    states = [checkpoint(), FIRST, SECOND]
    folders = [published(tmp_path / str(number), patch(state)) for number, state in enumerate(states)]
    wanted = [values(loaded(state)) for state in states]
    swap(patching, *folders[1])
    swap(patching, None)
    assert values(model) == wanted[0], "the weights before the first patch are the checkpoint's"
    for former, present in itertools.permutations(range(3), 2):
        swap(patching, *folders[former])
        swap(patching, *folders[present])
        assert values(model) == wanted[present]
        swap(patching, None)
        assert values(model) == wanted[former]
        swap(patching, None)
        assert values(model) == wanted[present]


def test_nothing_changes_before_the_flip_and_what_no_patch_names_is_left_alone(tmp_path: Path) -> None:
    model = loaded(checkpoint()).packed()
    patching = patcher(tmp_path, model)
    before, linears = values(model), {name: getattr(model, name).cpu_linear for name in ("head", "qk", "o")}
    only_q = checkpoint(q_weight=torch.tensor([[9.0, 2]]))
    assert prepare(patching, *published(tmp_path / "1", patch(only_q)))[0] == "done"
    assert values(model) == before
    assert model.qk.cpu_linear is linears["qk"]
    patching.flip()
    assert model.qk.weight.tolist() == [[9, 2], [3, 4], [5, 6]]
    assert model.qk.cpu_linear is not linears["qk"]
    assert (model.head.cpu_linear, model.o.cpu_linear) == (linears["head"], linears["o"])


def test_a_bfloat16_that_the_engine_holds_as_a_float32_is_patched_there(tmp_path: Path) -> None:
    model = loaded(checkpoint())
    model.norm.weight.data = model.norm.weight.float()
    patching = patcher(tmp_path, model)
    swap(patching, *published(tmp_path / "1", patch(checkpoint(norm_weight=torch.tensor([1.0, -3])))))
    assert (model.norm.weight.dtype, model.norm.weight.tolist()) == (torch.float32, [1, -3])
    swap(patching, None)
    assert model.norm.weight.tolist() == [1, 1]


def renamed(whole: WeightPatch, **fields: Any) -> WeightPatch:
    """Give the first tensor other fields."""
    first = whole.tensors[0]
    named = {name: getattr(first, name) for name in first.__struct_fields__} | fields
    return whole._replace(tensors=[PatchedTensor(**named), *whole.tensors[1:]])


def last_gap(whole: WeightPatch, gap: int) -> WeightPatch:
    """Give the last change of the last tensor another distance from the one before."""
    low, high, *bits = whole.streams
    return whole._replace(streams=[low[:-1] + bytes([gap & 255]), high[:-1] + bytes([gap >> 8]), *bits])


WRONG = {
    "no tensor of this name": (renamed(patch(FIRST), name="embed.bias"), "no embed.bias"),
    "another shape": (renamed(patch(FIRST), shape=[2, 3]), r"no embed.weight of shape \[2, 3\]"),
    "a tensor twice": (patch(FIRST)._replace(tensors=[patch(FIRST).tensors[0]] * 3), "twice"),
    "a place outside": (last_gap(patch(FIRST), 7), "patch of o.weight has places that are not in it"),
    "no place": (last_gap(patch(FIRST), GO_ON), "patch of o.weight has places that are not in it"),
    "another place": (last_gap(patch(FIRST), 4), "patch of o.weight does not give the sum"),
    "another sum": (renamed(patch(FIRST), sum=patch(FIRST).tensors[0].sum + 1), "patch of embed.weight does not give"),
    "of other weights": (patch(FIRST, SECOND), "does not give the sum"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_patch_that_does_not_fit_is_refused_and_the_next_one_is_taken(tmp_path: Path, fault: str) -> None:
    model = loaded(checkpoint()).packed()
    patching = patcher(tmp_path, model)
    swap(patching, *published(tmp_path / "2", patch(SECOND)))
    before = values(model)
    wrong, said = WRONG[fault]
    state, reason = prepare(patching, *published(tmp_path / "wrong", wrong))
    assert state == "refused"
    assert re.search(said, reason)
    patching.flip()
    assert values(model) == before
    swap(patching, *published(tmp_path / "1", patch(FIRST)))
    swap(patching, None)
    assert values(model) == before


def test_a_patch_of_an_anchor_gives_the_weights_of_one_of_the_checkpoint(tmp_path: Path) -> None:
    """To a version from any other, and back to the checkpoint, which the last patch makes of its anchor."""
    model = loaded(checkpoint()).packed()
    patching = patcher(tmp_path, model)
    base, found = values(model), {}
    swap(patching, *published(tmp_path / "2", patch(SECOND)))
    found[2] = values(model)
    swap(patching, *published(tmp_path / "1", patch(FIRST)))
    found[1] = values(model)
    assert found[1] != found[2]
    swap(patching, *published(tmp_path / "2 of 1", patch(SECOND, FIRST), patch(FIRST)))
    assert values(model) == found[2]
    swap(patching, *published(tmp_path / "1 of 2", patch(FIRST, SECOND), patch(SECOND)))
    assert values(model) == found[1]
    swap(patching, None)
    assert values(model) == found[2]
    swap(patching, *published(tmp_path / "0 of 2", patch(checkpoint(), SECOND), patch(SECOND)))
    assert values(model) == base


def test_a_patch_with_another_anchor_than_its_own_is_refused(tmp_path: Path) -> None:
    model = loaded(checkpoint()).packed()
    patching = patcher(tmp_path, model)
    before = values(model)
    folder, checksum = published(tmp_path / "1", patch(SECOND, FIRST), patch(FIRST))
    (folder / ANCHOR_FILE).write_bytes(pack(patch(SECOND))[0])
    state, reason = prepare(patching, folder, checksum)
    assert (state, "CRC-32" in reason) == ("refused", True)
    state, reason = prepare(patching, folder)
    assert (state, "checksum" in reason) == ("refused", True)
    (folder / ANCHOR_FILE).unlink()
    assert prepare(patching, folder)[0] == "refused"
    wrong = published(tmp_path / "2", patch(FIRST, SECOND), patch(FIRST))
    state, reason = prepare(patching, *wrong)
    assert (state, "does not give the sum" in reason) == ("refused", True)
    assert values(model) == before


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    model = loaded(checkpoint())
    patching = patcher(tmp_path, model)
    folder, checksum = published(tmp_path / "1", patch(FIRST))
    state, reason = prepare(patching, folder, checksum ^ 1)
    assert (state, "CRC-32" in reason) == ("refused", True)
    assert prepare(patching, tmp_path / "none")[0] == "failed"
    assert values(model) == values(loaded(checkpoint()))


def test_a_change_of_a_tensor_that_the_engine_does_not_use_is_refused(tmp_path: Path) -> None:
    state = checkpoint(other_weight=torch.ones(3))
    patching = Patcher(loaded(state), write(tmp_path / "base", state), BF16)
    changed = patch(state | {"other.weight": torch.zeros(3)}, state)
    state_after, reason = prepare(patching, *published(tmp_path / "1", changed))
    assert (state_after, "other.weight, which the engine does not use" in reason) == ("refused", True)


def stale_head(model: Model) -> None:
    packed = torch.arange(1.0, 9).view(4, 2).to(BF16).t()
    model.head.cpu_linear = lambda x: x @ packed


def a_bit(model: Model) -> None:
    model.embed.weight.data[0, 0] = 1.0078125


def a_bit_that_no_patch_changes(model: Model) -> None:
    model.norm.weight.data[0] = 1.0078125


def half(model: Model) -> None:
    model.o.weight.data[0] = torch.tensor([1.0, 2])


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (stale_head, "embed.weight"),
        (a_bit, "embed.weight"),
        (a_bit_that_no_patch_changes, "norm.weight"),
        (half, "o.weight"),
    ],
)
def test_weights_that_are_not_the_patched_ones_are_refused_by_their_name(
    tmp_path: Path, fault: Any, named: str
) -> None:
    model = loaded(checkpoint()).packed()
    patching = patcher(tmp_path, model)
    prepare(patching, *published(tmp_path / "1", patch(FIRST)))
    patching.flip()
    fault(model)
    patching.prove()
    state, reason = ended(patching)
    assert (state, f"the weights of {named} are not" in reason) == ("refused", True)


def test_a_flip_that_did_not_happen_is_refused(tmp_path: Path) -> None:
    model = loaded(checkpoint())
    patching = patcher(tmp_path, model)
    prepare(patching, *published(tmp_path / "1", patch(FIRST)))
    patching._installs = []
    patching.flip()
    patching.prove()
    state, reason = ended(patching)
    assert (state, "embed.weight, o.weight, qk.weight are not" in reason) == ("refused", True)


def test_a_layer_that_computes_with_other_numbers_than_it_was_loaded_with_cannot_be_patched(tmp_path: Path) -> None:
    model = loaded(checkpoint()).packed()
    model.o.cpu_linear = lambda x: -x
    with pytest.raises(UnmappedError, match=r"does not compute with o\.weight"):
        patcher(tmp_path, model)


def test_a_machine_without_room_has_room_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(checkpoint())
    patching = patcher(tmp_path, model)
    first = published(tmp_path / "1", patch(FIRST))

    def full(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Patcher, "_exchanges", full)
        assert prepare(patching, *first)[0] == "failed"
    swap(patching, *first)
    assert values(model) == values(loaded(FIRST))
