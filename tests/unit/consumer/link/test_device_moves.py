"""What leaves a device and comes back is the same, for everybody who holds it."""

import gc
import weakref

import pytest
import torch

from consumer.link.device_moves import DeviceMoves

pytestmark = pytest.mark.numeric


class Model(torch.nn.Module):
    """A frozen layer, a trained one, tied weights and a buffer that lies in the middle of another tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(5, 7).requires_grad_(False)
        self.trained = torch.nn.Linear(7, 5, dtype=torch.bfloat16)
        self.tied = torch.nn.Linear(5, 7, bias=False)
        self.tied.weight = self.frozen.weight
        pool = torch.randn(40)
        self.register_buffer("first", pool[:12].view(3, 4).t())
        self.register_buffer("second", pool[10:])


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.long
def test_out_and_back_is_bitwise_the_same_and_nobody_has_to_know() -> None:
    torch.manual_seed(0)
    model = Model()
    state: list[torch.Tensor] = []  # of an optimizer, which makes it in its first step

    def kept() -> list[torch.Tensor]:
        return [*model.parameters(), *model.buffers(), *state]

    def step() -> None:
        model.trained(model.frozen(torch.ones(2, 5)).bfloat16()).sum().backward()
        state.extend([] if state else [torch.zeros_like(each) for each in model.trained.parameters()])
        for each, momentum in zip(model.trained.parameters(), state, strict=True):
            assert each.grad is not None
            momentum.mul_(0.9).add_(each.grad)
            each.data.sub_(0.1 * momentum)
        model.zero_grad()

    moves = DeviceMoves(torch.device("cpu"), kept)
    parameters = list(model.parameters())
    assert moves.num_bytes == 4 * (7 * 5 + 7) + 2 * (5 * 7 + 5) + 4 * 40
    for _ in range(3):
        before, places = bits(kept()), [tensor.data_ptr() for tensor in kept()]
        moves.back()
        assert bits(kept()) == before
        assert all(here != there for here, there in zip(places, map(torch.Tensor.data_ptr, kept()), strict=True))
        step()
        before, states = bits(kept()), kept()
        moves.out()
        assert bits(kept()) == before
        assert all(one is other for one, other in zip(states, kept(), strict=True))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model.tied.weight is model.frozen.weight
    assert model.first.untyped_storage().data_ptr() == model.second.untyped_storage().data_ptr()
    assert model.first.stride() == (1, 4)
    assert moves.num_bytes > 4 * (7 * 5 + 7) + 2 * (5 * 7 + 5) + 4 * 40, "the optimizer's state comes back, too"


@pytest.mark.long
def test_frozen_weights_keep_their_place_in_host_memory() -> None:
    model = Model()
    moves = DeviceMoves(torch.device("cpu"), model.parameters)
    host = model.frozen.weight.data_ptr()
    for _ in range(2):
        moves.back()
        assert model.frozen.weight.data_ptr() != host
        moves.out()
        assert model.frozen.weight.data_ptr() == host


@pytest.mark.long
def test_what_is_not_needed_any_more_is_dropped_before_the_rest_leaves() -> None:
    passing = [torch.ones(3)]
    moves = DeviceMoves(torch.device("cpu"), lambda: passing, passing.clear)
    moves.back()
    moves.out()
    assert (passing, moves.num_bytes) == ([], 0)


@pytest.mark.long
def test_tensors_of_garbage_do_not_stay() -> None:
    moves = DeviceMoves(torch.device("cpu"), list)
    cycle: list[object] = [torch.ones(3)]
    cycle.append(cycle)
    tensor = weakref.ref(cycle[0])
    gc.disable()
    try:
        del cycle
        assert tensor() is not None
        moves.out()
        assert tensor() is None
    finally:
        gc.enable()


def test_a_device_without_room_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    moves = DeviceMoves(torch.device("cpu"), model.parameters)
    before, places = bits(list(model.parameters())), [each.data_ptr() for each in model.parameters()]
    room = iter([torch.empty(140, dtype=torch.uint8).untyped_storage()])

    def refuse(size: int) -> torch.UntypedStorage:
        if (found := next(room, None)) is None:
            raise torch.OutOfMemoryError("no")
        return found

    monkeypatch.setattr(moves, "_on_device", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        moves.back()
    assert bits(list(model.parameters())) == before
    assert [each.data_ptr() for each in model.parameters()] == places
