"""`producer.engine.adapter_worker`, with numbers worked by hand."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from producer.engine.adapter_worker import AdapterLoader, BackgroundWork, CpuLora, PartlyServedError, groups_of

ONE = SimpleNamespace(lora_name="v1", lora_int_id=1)


class Manager:
    """Stands for vLLM's worker-side LoRA manager."""

    def __init__(self, error: Exception | None = None) -> None:
        self.read: list[int] = []
        self._error = error
        self.loras = {"model.layers.0.self_attn.q_proj": "weights"}
        self._adapter_manager = SimpleNamespace(
            punica_wrapper_mapping={},
            modules={"model.layers.0.self_attn.qkv_proj": "a layer", "model.layers.0.mlp.down_proj": "another"},
            packed_modules={"model.layers.0.self_attn.qkv_proj": [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]},
        )

    def _load_adapter(self, request: Any) -> SimpleNamespace:
        self.read.append(request.lora_int_id)
        if self._error is not None:
            raise self._error
        return SimpleNamespace(name=request.lora_name, loras=self.loras)


def prepared(manager: Manager) -> AdapterLoader:
    loading = AdapterLoader(manager)
    loading.prepare(ONE)
    assert loading.thread is not None
    loading.thread.join()
    return loading


def test_what_was_read_in_the_thread_is_put_in_its_place_once() -> None:
    manager = Manager()
    loading, placed = prepared(manager), []

    def add(request: Any) -> bool:
        placed.append(manager._load_adapter(request).name)
        return True

    assert [loading.finish(add), loading.finish(add)] == [("done", "")] * 2
    assert (placed, manager.read) == (["v1"], [1])
    assert manager._load_adapter(SimpleNamespace(lora_name="v2", lora_int_id=2)).name == "v2"
    assert manager.read == [1, 2]


def test_while_it_is_read_nothing_is_put_anywhere() -> None:
    manager, may_go_on = Manager(), threading.Event()
    read, manager._load_adapter = manager._load_adapter, lambda request: may_go_on.wait(10) and read(request)  # type: ignore
    loading = AdapterLoader(manager)
    loading.prepare(ONE)
    assert loading.finish(lambda request: pytest.fail("too early")) == ("running", "")
    may_go_on.set()
    assert loading.thread is not None
    loading.thread.join()
    assert loading.finish(lambda request: True) == ("done", "")


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
def test_what_cannot_be_read_is_refused_and_what_may_be_read_later_has_failed(error, state) -> None:
    found = prepared(Manager(error)).finish(lambda request: pytest.fail("nothing to add"))
    assert found[: len(state)] == state


@pytest.mark.parametrize("has_gpu", [False, True])
def test_on_a_gpu_the_thread_gives_no_core_away_because_the_engine_waits_for_its_gil(monkeypatch, has_gpu) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    preparation, niceness = BackgroundWork(), []
    preparation.begin(lambda: niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    preparation.thread.join()
    assert (niceness[0] > os.getpriority(os.PRIO_PROCESS, 0)) == (not has_gpu)


def test_what_cannot_be_put_in_its_place_is_refused_with_the_reason() -> None:
    def fits_nowhere(request: Any) -> bool:
        raise RuntimeError("shapes differ")

    loading = prepared(Manager())
    assert [loading.finish(fits_nowhere), loading.finish(fits_nowhere)] == [
        ("refused", "RuntimeError: shapes differ")
    ] * 2
    assert prepared(Manager()).finish(lambda request: False)[0] == "refused"


@pytest.mark.parametrize(
    ("module", "is_served"),
    [
        ("model.layers.0.self_attn.v_proj", True),
        ("model.layers.7.mlp.down_proj", True),  # another worker of a pipeline has this layer
        ("model.layers.0.mlp.experts.3.w1", True),
        ("model.layers.0.self_attn.o_proj", False),
        ("lm_head", False),
    ],
)
def test_an_adapter_with_a_module_that_the_engine_does_not_serve_is_refused(module: str, is_served: bool) -> None:
    manager = Manager()
    manager.loras[module] = "weights"
    state, said = prepared(manager).finish(lambda request: True)
    assert (state, module in said) == (("done", False) if is_served else ("refused", True))


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
