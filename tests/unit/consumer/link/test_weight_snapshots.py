"""Patches that a trainer publishes of its own weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from consumer.link.patch_maker import KEPT_FILE, MOST_GROWTH
from consumer.link.policy_store import PublishedPolicy
from consumer.link.weight_snapshots import WeightSnapshots, check_names
from protocol.errors import ConfigError
from protocol.wire.patch_streams import changes_of, composed
from protocol.wire.weight_patch import WeightPatch, pack, parse


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


class Large(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((100, 100), 0.5))
        self.other = torch.nn.Parameter(torch.full((7,), 0.5))

        generator = torch.Generator().manual_seed(0)
        self.order = torch.randperm(10_000, generator=generator)
        self.values = torch.randn(10_000, generator=generator)

    @torch.no_grad()
    def change(self, number: int, factor: float = 1.0) -> None:
        """Give so many elements another value than 0.5; their number decides how large a patch is."""
        chosen = self.order[:number]
        self.weight.fill_(0.5).view(-1)[chosen] = factor * self.values[chosen]


def changes(patches: list[WeightPatch]) -> dict[str, tuple[int, list[int], list[int]]]:
    found = composed(patches) if len(patches) > 1 else changes_of(patches[0])
    return {tensor.name: (tensor.sum, places.tolist(), bits.tolist()) for tensor, places, bits in found if len(places)}


def check_leads_there(policy: PublishedPolicy, snapshots: WeightSnapshots) -> None:
    """Compare a policy, with its anchor, with the patch of the checkpoint, which is made beside it."""
    snapshot = snapshots.take()
    direct = snapshots.patch(snapshot.weights)
    snapshot.release()
    patches = [parse(policy.data)]
    assert patches[0].anchor == (policy.anchor.digest if policy.anchor else "")
    if policy.anchor is not None:
        patches.insert(0, parse(policy.anchor.data))
        assert pack(patches[0])[1] == policy.anchor.digest
    assert changes(patches) == changes([direct])


def test_a_patch_that_has_grown_is_of_the_checkpoint_and_the_anchor_of_those_after_it(tmp_path: Path) -> None:
    model = Large()
    snapshots = WeightSnapshots(model)
    found: list[PublishedPolicy] = []
    for count in (0, 20, 40, 4000, 4000, 4020, 10_000, 10_000):
        model.change(count)
        found.append(snapshots.take().published(len(found)))
        check_leads_there(found[-1], snapshots)
    empty, first, second, grown, same, near, far, farthest = found
    assert {policy.anchor for policy in (empty, first, second, grown)} == {None}
    assert len(grown.data) > MOST_GROWTH * len(first.data) > len(second.data)
    assert (same.digest, same.data, same.anchor) == (grown.digest, grown.data, None), "it is the anchor itself"
    assert near.anchor is not None
    assert (near.anchor.digest, near.anchor.data) == (grown.digest, grown.data)
    assert (far.anchor, farthest.digest) == (None, far.digest)
    model.change(0)
    back = snapshots.take().published(9)
    check_leads_there(back, snapshots)
    assert back.anchor is not None
    assert back.anchor.digest == far.digest


@pytest.mark.long
def test_equal_weights_after_equal_ones_give_equal_blobs_also_from_any_checkpoint(tmp_path: Path) -> None:
    """A snapshot waits at a checkpoint, or is made first."""
    num_anchored = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        counts = [int(10 ** (4 * torch.rand(1, generator=generator).item())) for _ in range(14)]
        model, blobs = Large(), []
        snapshots = WeightSnapshots(model)
        for step, count in enumerate(counts):
            model.change(count, 1 + step // 4)
            policy = snapshots.take().published(step)
            check_leads_there(policy, snapshots)
            blobs.append((policy.digest, policy.anchor and policy.anchor.digest))
            folder = tmp_path / f"{seed}-{step}"
            folder.mkdir()
            snapshots.save(folder)
        num_anchored += sum(anchor is not None for _, anchor in blobs)
        for start in range(len(counts)):
            again = Large()
            resumed = WeightSnapshots(again)
            resumed.restore(tmp_path / f"{seed}-{start}")
            for step, count in enumerate(counts):  # the weights come from the checkpoint, too
                again.change(count, 1 + step // 4)
                if step >= start:
                    waiting = resumed.take()
                    if step % 3:
                        resumed.save(tmp_path)
                    policy = waiting.published(step)
                    assert (policy.digest, policy.anchor and policy.anchor.digest) == blobs[step]
    assert num_anchored > 12


def test_a_snapshot_that_is_dropped_is_not_made() -> None:
    model = Large()
    snapshots = WeightSnapshots(model)
    dropped = snapshots.take()
    model.change(30)
    kept = snapshots.take()
    dropped.release()
    assert parse(kept.published(1).data).tensors[0].num_changes == 29
    dropped.release()
    assert len(snapshots._free) == 2, "each buffer is free once"


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    model = Large()
    snapshots = WeightSnapshots(model)
    for count in (10, 5000):
        model.change(count)
        anchor = snapshots.take().published(0)
    snapshots.save(tmp_path)
    other = Large()
    with torch.no_grad():
        other.weight[50, 50] = 3.0
    data = (tmp_path / KEPT_FILE).read_bytes()
    assert data == bytes(8) + anchor.data, "no patch of the anchor is there yet"
    with pytest.raises(ConfigError, match=r"run_dir: .*model\.path"):
        WeightSnapshots(other).restore(tmp_path)
    with pytest.raises(ConfigError, match=r"run_dir: .*no weight of shape"):
        WeightSnapshots(Model()).restore(tmp_path)
    for wrong in (data[:-1], b"", data.replace(b"other", b"otter")):
        (tmp_path / KEPT_FILE).write_bytes(wrong)
        if wrong != data:
            with pytest.raises(ConfigError, match="run_dir"):
                WeightSnapshots(Large()).restore(tmp_path)


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
