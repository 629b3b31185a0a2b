"""Numbers read at the scrape, what is taken over from another registry, and memory."""

import os
import sys

import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import generate_latest as text_of

from protocol import exposition
from protocol.exposition import add_process_metrics
from protocol.gpu.nvml import Gpu
from protocol.runtime.metrics import Readings, Reexport


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in text_of(registry).decode().splitlines() if not line.startswith("#")]


def test_a_reading_is_taken_at_the_scrape() -> None:
    registry, state = CollectorRegistry(), {"groups": 1}
    readings = Readings(registry)
    readings.counter("rl_x_groups_total", "Groups.", lambda: state["groups"])
    readings.gauges("rl_x_leases", "Leases.", "stage", lambda: {"waiting": 2, "scoring": 0})
    state["groups"] = 5
    assert lines(registry) == [
        "rl_x_groups_total 5.0",
        'rl_x_leases{stage="waiting"} 2.0',
        'rl_x_leases{stage="scoring"} 0.0',
    ]


def test_only_families_with_the_prefix_are_taken_over_under_their_own_names() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    Gauge("vllm:running", "Running.", registry=other).set(3)
    Gauge("python_things", "Other.", registry=other)
    Reexport(registry, other, "vllm:")
    assert lines(registry) == ["vllm:running 3.0"]


def test_memory_of_the_daemon_includes_its_children() -> None:
    registry = CollectorRegistry()
    add_process_metrics(registry, "rl_x", [])
    value = registry.get_sample_value("rl_x_resident_memory_bytes")
    assert value is not None
    assert value >= 0.5 * psutil.Process(os.getpid()).memory_info().rss
    assert registry.get_sample_value("process_resident_memory_bytes") is not None
    assert not [line for line in lines(registry) if line.startswith("rl_x_gpu")]


def test_gpu_memory_comes_from_nvml_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "gpu_facts", lambda index: Gpu(index, "GPU-a", 80, 70 - index))
    registry = CollectorRegistry()
    add_process_metrics(registry, "rl_x", [1, 3])
    assert registry.get_sample_value("rl_x_gpu_memory_used_bytes", {"gpu": "1"}) == 11
    assert registry.get_sample_value("rl_x_gpu_memory_used_bytes", {"gpu": "3"}) == 13
    assert registry.get_sample_value("rl_x_gpu_memory_total_bytes", {"gpu": "3"}) == 80


def test_a_driver_that_does_not_answer_costs_nothing_but_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    registry = CollectorRegistry()
    add_process_metrics(registry, "rl_x", [0])
    assert registry.get_sample_value("rl_x_gpu_memory_used_bytes", {"gpu": "0"}) is None
    assert registry.get_sample_value("rl_x_resident_memory_bytes") is not None
