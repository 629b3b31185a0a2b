"""Streams of patches: what differs, how far it is apart, and the way back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.wire.adapter_blob import BlobError
from protocol.wire.patch_streams import PER_WORD, Words, changes, changes_of, composed, element_sum, gaps_of
from protocol.wire.weight_patch import GO_ON, PatchedTensor, WeightPatch
from tests import weight_patches

ELEMENTS = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40)


def words(elements: list[int]) -> Words:
    return np.array(elements + [0] * (-len(elements) % PER_WORD), np.uint16).view(np.uint64)


@pytest.mark.long
@given(ELEMENTS, st.data())
def test_changes_are_the_elements_that_differ(old: list[int], data: st.DataObject) -> None:
    new = data.draw(st.lists(st.integers(0, 2**16 - 1) | st.sampled_from(old), min_size=len(old), max_size=len(old)))
    found = [
        (place, bit)
        for places, bits, _ in changes(words(old), words(new))
        for place, bit in zip(places.tolist(), bits.tolist(), strict=True)
    ]
    expected = [(place, one ^ other) for place, (one, other) in enumerate(zip(old, new, strict=True)) if one != other]
    assert found == expected
    assert sum(change for *_, change in changes(words(old), words(new))) == sum(new) - sum(old)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([0, 1, 5], [0, 0, 3]),
        ([GO_ON - 1], [GO_ON - 1]),
        ([GO_ON], [GO_ON, 0]),
        ([3, 3 + GO_ON], [3, GO_ON - 1]),
        ([3, 4 + 2 * GO_ON], [3, GO_ON, GO_ON, 0]),
    ],
)
def test_gaps_by_hand(places: list[int], expected: list[int]) -> None:
    assert gaps_of(np.array(places, np.int64)).tolist() == expected
    later = np.array([place + 7 for place in places], np.int64)
    assert gaps_of(later, 6).tolist() == expected, "the change before it is the last one of another piece"


@pytest.mark.parametrize("between", [1, GO_ON, GO_ON + 1])
def test_a_gap_spans_two_pieces(between: int) -> None:
    """`between` elements lie between the last change of one piece and the first of the next, which begins at 2**19."""
    old = {"a": torch.zeros(2**20, dtype=torch.int16)}
    new = {"a": old["a"].clone()}
    new["a"][[3, 2**19 - 1, 2**19 + between, 2**20 - 1]] = torch.tensor([5, -1, 256, 1], dtype=torch.int16)
    ((tensor, places, bits),) = changes_of(weight_patches.patch_between(old, new))
    assert places.tolist() == [3, 2**19 - 1, 2**19 + between, 2**20 - 1]
    assert (bits.tolist(), tensor.sum) == ([5, 65535, 256, 1], 5 + 65535 + 256 + 1)


@pytest.mark.parametrize("count", [0, 4, 2**16, 2**16 + 4])
def test_the_sum_of_the_greatest_elements_is_exact(count: int) -> None:
    assert element_sum(np.full(count, 2**16 - 1, np.uint16).view(np.uint64)) == count * (2**16 - 1)


@pytest.mark.parametrize(("size", "gaps"), [(3, [3]), (4, [1, 2]), (GO_ON + 1, [GO_ON])])
def test_places_beyond_a_tensor_are_refused(size: int, gaps: list[int]) -> None:
    low, high = bytes(gap & 255 for gap in gaps), bytes(gap >> 8 for gap in gaps)
    bits = bytes(len(gaps))
    tensor = PatchedTensor("w", [size], len(gaps), len(gaps), 0)
    with pytest.raises(BlobError, match="w"):
        list(changes_of(WeightPatch("", [tensor], [low, high, bits, bits])))


def test_places_by_hand() -> None:
    """Changes at 0, 65534, 131070 (65535 elements later) and 131071 + 2 * 65535."""
    gaps = [0, 65533, GO_ON, 0, GO_ON, GO_ON, 0]
    places = [0, 65534, 131070, 131070 + 2 * GO_ON]
    low, high = (bytes(gap >> shift & 255 for gap in gaps) for shift in (0, 8))
    tensor = PatchedTensor("a", [300_000], 4, 7, 0)
    whole = WeightPatch("", [PatchedTensor("b", [1], 0, 0, 0), tensor], [low, high, b"\1\2\3\4", b"\0\0\0\1"])
    (_, none, _), (named, found, bits) = changes_of(whole)
    assert none.tolist() == []
    places = [0, 65534, 65534 + 65535 + 1, 65534 + 65535 + 1 + 2 * GO_ON + 1]
    assert (named, found.tolist(), bits.tolist()) == (tensor, places, [1, 2, 3, 0x104])
    with pytest.raises(BlobError, match="patch of a has places"):
        list(changes_of(whole._replace(tensors=[whole.tensors[0], PatchedTensor("a", [places[-1]], 4, 7, 0)])))


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 65535)), max_size=20), min_size=1, max_size=3)
)
def test_changes_come_back_from_a_patch(tensors: list[list[tuple[int, int]]]) -> None:
    old = {str(number): torch.randint(-32768, 32767, (200_001,), dtype=torch.int16) for number in range(len(tensors))}
    new = {name: tensor.clone() for name, tensor in old.items()}
    expected = {str(number): dict(sorted(its_changes)) for number, its_changes in enumerate(tensors)}
    for name, its_changes in expected.items():
        for place, bits in its_changes.items():
            new[name][place] ^= np.uint16(bits).astype(np.int16).item()
    made = weight_patches.patch_between(old, new)
    found = {tensor.name: (tensor.sum, places.tolist(), bits.tolist()) for tensor, places, bits in changes_of(made)}
    assert found == {
        name: (
            int(weight_patches.words_of(new[name]).view(np.uint16).sum(dtype=np.int64)),
            list(its_changes),
            list(its_changes.values()),
        )
        for name, its_changes in expected.items()
        if its_changes
    }


def test_two_patches_one_after_the_other_by_hand() -> None:
    """The first changes elements 1 and 3 of a, and b; the second takes the change of 3 back, changes 0 and 1, and c."""
    states = [
        {"a": [8, 8, 8, 8], "b": [5], "c": [5]},
        {"a": [8, 9, 8, 12], "b": [7], "c": [5]},
        {"a": [0, 11, 8, 8], "b": [7], "c": [4]},
    ]
    base, anchor, last = ({name: torch.tensor(it, dtype=torch.int16) for name, it in state.items()} for state in states)
    patches = [weight_patches.patch_between(base, anchor), weight_patches.patch_between(anchor, last)]
    found = {tensor.name: (tensor.sum, places.tolist(), bits.tolist()) for tensor, places, bits in composed(patches)}
    assert found == {"a": (27, [0, 1], [8, 3]), "b": (7, [0], [2]), "c": (4, [0], [1])}
    back = [patches[0], weight_patches.patch_between(anchor, base)]
    assert [(each.name, each.sum, len(places)) for each, places, _ in composed(back)] == [("a", 32, 0), ("b", 5, 0)]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_patch_of_an_anchor_leads_where_the_patch_of_the_checkpoint_leads(seed: int) -> None:
    """By each of several versions, back to the first one too: of a large tensor a few elements change, of small ones most."""
    random = np.random.default_rng(seed)
    sizes = [200_000, *random.integers(1, 40, 3).tolist()]
    base = {str(number): random.integers(0, 2**16, size, np.uint16) for number, size in enumerate(sizes)}

    def moved(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        new = {name: each.copy() for name, each in state.items()}
        for each in new.values():
            if random.random() < 0.7:
                count = int(random.integers(0, min(len(each), 100) + 1))
                each[random.integers(0, len(each), count)] ^= random.integers(0, 4, count, np.uint16)
        return new

    def between(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> WeightPatch:
        tensors = ({name: torch.from_numpy(it.view(np.int16)) for name, it in state.items()} for state in (old, new))
        return weight_patches.patch_between(*tensors)

    anchor = version = moved(base)
    for _ in range(4):
        version = base if random.random() < 0.2 else moved(version)
        direct = changes_of(between(base, version))
        both = composed([between(base, anchor), between(anchor, version)])
        expected, found = (
            {tensor.name: (tensor.sum, places.tolist(), bits.tolist()) for tensor, places, bits in each if len(places)}
            for each in (direct, both)
        )
        assert found == expected
        assert all(tensor.sum == int(version[tensor.name].sum(dtype=np.int64)) for tensor, *_ in both)
