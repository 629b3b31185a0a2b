"""The stand-in refuses and counts as a GPU does, or what the other tests show would not be worth much."""

import pytest
import torch

from tests.gpu.coverage import guarded_lines
from tests.gpu.stand_in.cuda import Gpu


@pytest.mark.stand_in
def test_tensors_of_both_devices_do_not_mix() -> None:
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    for mixed in (
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: here[torch.tensor([0], device="cuda")],
    ):
        with pytest.raises(RuntimeError):
            mixed()
    with pytest.raises(TypeError):
        there.numpy()
    assert (there + torch.ones(())).is_cuda, "a scalar may come from the host"
    assert there[torch.tensor([0, 1])].is_cuda, "so may an index"


@pytest.mark.stand_in
def test_memory_is_counted_and_runs_out(gpu: Gpu) -> None:
    held = torch.empty(1000, dtype=torch.uint8, device="cuda")
    view, other = held[10:20], held + 1
    assert torch.cuda.memory_allocated() == 2 * 1024
    del held
    assert torch.cuda.memory_allocated() == 2 * 1024, "a view holds the memory"
    del view, other
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 2 * 1024
    gpu.total_bytes = 10_000
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(20_000, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_stats()["num_ooms"] == 1


@pytest.mark.stand_in
def test_gradients_and_autocast_are_those_of_a_gpu() -> None:
    linear = torch.nn.Linear(4, 4, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        made = linear(torch.ones(2, 4, device="cuda"))
        loss = made.softmax(-1).pow(2).sum()
    loss.backward()
    assert (made.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert linear.weight.grad.is_cuda


@pytest.mark.stand_in
def test_pinned_memory_is_known(gpu: Gpu) -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    before = gpu.num_syncs
    torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    assert gpu.num_syncs == before
    torch.ones(3, device="cuda").sum().item()
    assert gpu.num_syncs == before + 1


def test_which_lines_only_a_gpu_makes_run() -> None:
    source = '''\
def moved(device, tensor):
    if device.type == "cuda":
        tensor = pinned(tensor)
    if not tensor.is_cuda:
        return tensor
    return wait(tensor)

def size(device):
    """Ask the GPU."""
    return torch.cuda.memory_allocated(device)

def refused(name, on_gpu):
    if name == "paged" and not on_gpu:
        raise ValueError(name)

def free(device):
    if device.type != "cuda":
        return inf
    return torch.cuda.mem_get_info(device)[0]
'''
    assert guarded_lines(source) == {3, 6, 10, 19}
