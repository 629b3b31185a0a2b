"""Counts of the engine's steps, by hand, with the numbers that vLLM hands its loggers."""

from types import SimpleNamespace
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from producer.engine.engine import _LoadRecorder
from producer.engine_contract import EngineLoad, EngineSteps


def scheduler(mode: CUDAGraphMode | None = None, tokens: int = 0) -> SchedulerStats:
    graph = None if mode is None else CUDAGraphStat(tokens, tokens + 8, 8, str(mode))
    return SchedulerStats(num_running_reqs=5, num_waiting_reqs=2, kv_cache_usage=0.5, cudagraph_stats=graph)


def outputs(first: int, next_ones: int, computed: int = 0, preempted: int = 0) -> Any:
    """An iteration in which sequences sampled their first or their next token."""
    stats = IterationStats()
    stats.time_to_first_tokens_iter, stats.inter_token_latencies_iter = [0.1] * first, [0.1] * next_ones
    stats.num_generation_tokens, stats.num_preempted_reqs = first + next_ones, preempted
    stats.prompt_token_stats.update_from_output(SimpleNamespace(
        num_computed_tokens=computed, num_cached_tokens=48, num_prompt_tokens=computed + 48, num_local_cached_tokens=48,
        num_external_cached_tokens=0,
    ))  # fmt: skip
    return stats


def test_without_graphs_a_step_has_the_tokens_of_its_outputs() -> None:
    recorder = _LoadRecorder()
    recorder.record(scheduler(), outputs(first=2, next_ones=10, computed=100, preempted=1))
    recorder.record(scheduler(), outputs(first=0, next_ones=12, preempted=2))
    recorder.record(scheduler(), None)  # it has told its state, and computed nothing
    recorder.record(None, outputs(first=0, next_ones=0, preempted=4))
    recorder.record(scheduler(), None)
    assert recorder.load == EngineLoad(0.5, 5, 2, 7, EngineSteps(2, 112 + 12, 24, None))


def test_with_graphs_the_tokens_are_those_of_the_step_and_parts_of_prompts_are_steps() -> None:
    recorder = _LoadRecorder()
    recorder.record(scheduler(CUDAGraphMode.NONE, 2048), None)  # the first part of a prompt of 3,000
    recorder.record(scheduler(CUDAGraphMode.PIECEWISE, 952 + 10), outputs(first=1, next_ones=10, computed=3000))
    recorder.record(scheduler(CUDAGraphMode.FULL, 11), outputs(first=0, next_ones=11))
    assert recorder.load.steps == EngineSteps(number=3, tokens=2048 + 962 + 11, sequences=22, with_graph=2)
