"""`producer.engine.adapter_worker`, with numbers worked by hand."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from producer.engine.adapter_worker import AdapterLoader, BackgroundWork, CpuLora, groups_of
from producer.engine.published import PartlyServedError
from tests.unit.producer.engine.lora_layers import DOWN, Wrapped, manager_of, write_adapter

CONTENT = [[1, 2], [0, 0]], [[6, 0]]
"""A and B of the adapter that `prepared` reads, in a slot for rank 2."""


class Manager:
    """Stands for vLLM's worker-side LoRA manager."""

    device = torch.device("cpu")

    def __init__(self, error: Exception | None = None) -> None:
        self.read: list[int] = []
        self._error = error
        self.layer = Wrapped((1,), 2)
        self._adapter_manager = manager_of({DOWN: self.layer})

    def _load_adapter(self, request: Any) -> SimpleNamespace:
        self.read.append(request.lora_int_id)
        if self._error is not None:
            raise self._error
        return SimpleNamespace(name=request.lora_name)

    def add(self, request: Any) -> bool:
        """As vLLM does."""
        self._load_adapter(request)
        self.layer.put(0, *CONTENT)
        return True


def request_of(folder: Path, module: str = DOWN) -> Any:
    path = folder if folder.exists() else write_adapter(folder, {module: ([[1.0, 2.0]], [[3.0]])})
    return SimpleNamespace(lora_name="v1", lora_int_id=7, lora_path=str(path))


def prepared(manager: Manager, folder: Path, module: str = DOWN, checksum: int | None = None) -> AdapterLoader:
    loading = AdapterLoader(manager)
    loading.prepare(request_of(folder, module), checksum)
    joined(loading)
    return loading


def joined(loading: AdapterLoader) -> None:
    assert loading.thread is not None
    loading.thread.join()


def test_what_was_read_in_the_thread_is_put_in_its_place_once_and_proved(tmp_path: Path) -> None:
    manager = Manager()
    loading, placed = prepared(manager, tmp_path / "v1"), []

    def add(request: Any) -> bool:
        placed.append(request.lora_name)
        return manager.add(request)

    assert loading.advance(add)[0] in ("running", "done")
    joined(loading)
    assert [loading.advance(add), loading.advance(add)] == [("done", str(tmp_path / "v1"))] * 2
    assert (placed, manager.read) == (["v1"], [7])
    assert manager._load_adapter(SimpleNamespace(lora_name="v2", lora_int_id=2)).name == "v2"
    assert manager.read == [7, 2]


def test_what_is_put_in_its_place_wrongly_is_refused_and_so_are_other_files(tmp_path: Path) -> None:
    manager = Manager()
    loading = prepared(manager, tmp_path / "v1")
    loading.advance(lambda request: True)
    joined(loading)
    state, reason = loading.advance(lambda request: True)
    assert (state, DOWN in reason) == ("refused", True)
    state, reason = prepared(manager, tmp_path / "v1", checksum=5).advance(manager.add)
    assert (state, "are not those that were verified" in reason) == ("refused", True)


def test_while_it_is_read_nothing_is_put_anywhere(tmp_path: Path) -> None:
    manager, may_go_on = Manager(), threading.Event()
    read, manager._load_adapter = manager._load_adapter, lambda request: may_go_on.wait(10) and read(request)  # type: ignore
    loading = AdapterLoader(manager)
    loading.prepare(request_of(tmp_path / "v1"), None)
    assert loading.advance(lambda request: pytest.fail("too early")) == ("running", "")
    may_go_on.set()
    joined(loading)
    loading.advance(manager.add)
    joined(loading)
    assert loading.advance(manager.add) == ("done", str(tmp_path / "v1"))


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (PartlyServedError("in part"), ("refused", "in part")),
        (ValueError("rank 512"), ("refused", "ValueError: rank 512")),
        (KeyError("layers.7"), ("refused", "KeyError: 'layers.7'")),
        (OSError("too many open files"), ("failed", "OSError: too many open files")),
        (MemoryError(), ("failed", "MemoryError: ")),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), ("failed",)),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), ("failed",)),
    ],
)
def test_what_cannot_be_read_is_refused_and_what_may_be_read_later_has_failed(tmp_path, error, state) -> None:
    found = prepared(Manager(error), tmp_path / "v1").advance(lambda request: pytest.fail("nothing to add"))
    assert found[: len(state)] == state


def test_the_thread_has_the_priority_of_the_engine_s_steps_so_that_a_swap_does_not_wait_for_an_idle_core() -> None:
    preparation, niceness = BackgroundWork(), []
    preparation.begin(lambda: niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    preparation.thread.join()
    assert niceness == [os.getpriority(os.PRIO_PROCESS, 0)]


@pytest.mark.long
def test_a_worker_that_ends_while_a_policy_is_prepared_ends_well() -> None:
    program = """
import torch
from producer.engine.adapter_worker import BackgroundWork
ones = torch.ones(300, 300)
BackgroundWork().begin(lambda: [ones.mm(ones) for _ in range(1000)])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_cannot_be_put_in_its_place_is_refused_with_the_reason(tmp_path: Path) -> None:
    def fits_nowhere(request: Any) -> bool:
        raise RuntimeError("shapes differ")

    loading = prepared(Manager(), tmp_path / "v1")
    assert [loading.advance(fits_nowhere), loading.advance(fits_nowhere)] == [
        ("refused", "RuntimeError: shapes differ")
    ] * 2
    assert prepared(Manager(), tmp_path / "v1").advance(lambda request: False)[0] == "refused"


def test_an_adapter_with_a_module_that_the_engine_does_not_serve_is_refused_before_it_is_added(tmp_path: Path) -> None:
    loading = prepared(Manager(), tmp_path / "v1", "lm_head")
    state, said = loading.advance(lambda request: pytest.fail("nothing to add"))
    assert (state, "lm_head" in said) == ("refused", True)


def test_tokens_by_adapter() -> None:
    assert groups_of(torch.tensor([2, 2, 2])) == [(2, slice(None))]
    assert groups_of(torch.tensor([-1, -1])) == []
    groups = [(place, tokens.tolist()) for place, tokens in groups_of(torch.tensor([1, -1, 0, 1]))]
    assert groups == [(0, [2]), (1, [0, 3])]


def test_each_token_is_multiplied_with_the_matrices_of_its_adapter() -> None:
    """Rank 1, two inputs, three outputs of which the last two are this layer's."""
    wrapper = SimpleNamespace(token_lora_indices=torch.tensor([1, -1, 0]), update_metadata=lambda mapping: None)
    CpuLora(wrapper)  # type: ignore[arg-type]
    wrapper.update_metadata("mapping")
    down = torch.tensor([[[[1.0, 10.0]]], [[[2.0, 20.0]]]])  # (adapters, 1, rank, inputs)
    up = torch.tensor([[[[1.0], [2.0]]], [[[3.0], [4.0]]]])  # (adapters, 1, outputs, rank)
    x = torch.tensor([[1.0, 1.0], [5.0, 5.0], [2.0, 0.0]])
    between, y = torch.zeros(3, 1), torch.full((3, 3), 100.0)
    wrapper._apply_shrink(between, x, down, 0.5)
    assert between.tolist() == [[11.0], [0.0], [1.0]]
    wrapper._apply_expand(y, between, up, 1, 2)
    assert y.tolist() == [[100.0, 133.0, 144.0], [100.0, 100.0, 100.0], [100.0, 101.0, 102.0]]
    wrapper._apply_expand(y, between, up, 1, 2, add_inputs=False)
    assert y.tolist() == [[100.0, 33.0, 44.0], [100.0, 0.0, 0.0], [100.0, 1.0, 2.0]]
