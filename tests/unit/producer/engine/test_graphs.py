"""Tokens of a step and sizes of CUDA graphs: by hand, for the limits that vLLM has on GPUs."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from producer.engine.configuration import num_places
from producer.engine.graphs import capture_sizes, tokens_of_step

OF_VLLM = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # on most GPUs, 51 sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "group_size", "of_vllm", "places", "tokens"),
    [
        (1024, 8, 8192, 1033, 2066),  # H100 and H200: 1,024 is 128 groups, and there is room for one more and a probe
        (1024, 16, 8192, 1041, 2082),
        (256, 8, 2048, 265, 2048),  # A100 and L4
        (256, 4, 1500, 261, 1500),  # vLLM takes fewer where no more fit
    ],
)
def test_a_step_of_a_small_model_has_tokens_for_prompts_beside_those_of_all_places(
    max_num_seqs: int, group_size: int, of_vllm: int, places: int, tokens: int
) -> None:
    assert num_places(max_num_seqs, group_size) == places
    assert tokens_of_step(of_vllm, places) == tokens


def test_sizes_go_on_in_eighths_of_powers_of_two_up_to_the_largest() -> None:
    assert capture_sizes(OF_VLLM, 1033, 1033) == [*OF_VLLM, *range(576, 1025, 64), 1033]
    of_small = [*OF_VLLM, *range(576, 1025, 64), 1033, *range(1152, 2049, 128), 2066]
    assert capture_sizes(OF_VLLM, 2066, 1033) == of_small
    assert capture_sizes([1, 2, 4, 8, 16, 24, 32], 100, 25) == [1, 2, 4, 8, 16, 24, 25, *range(32, 97, 8), 100]


def test_where_vllm_has_enough_only_the_number_of_places_is_new() -> None:
    assert capture_sizes(OF_VLLM, 265, 265) == sorted([*OF_VLLM, 265])
    assert capture_sizes(OF_VLLM, 512, 1033) == OF_VLLM, "no step has more tokens than 512"


def test_at_most_a_ninth_of_a_step_beyond_those_of_vllm_is_padding() -> None:
    sizes = capture_sizes(OF_VLLM, 8300, 1033)
    for tokens in range(513, 8301):
        graph = min(size for size in sizes if size >= tokens)
        assert graph - tokens < graph / 9


def manager_of(sizes: list[int], places: int) -> Any:
    """vLLM's own, as it is when it has captured these sizes with and without LoRA."""
    manager: Any = CudaGraphManager.__new__(CudaGraphManager)
    cache = SimpleNamespace(use_kda_recoverssm=False)
    manager.vllm_config = SimpleNamespace(speculative_config=None, cache_config=cache)
    manager.compilation_config = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1])
    manager.cudagraph_mode, manager.decode_query_len, manager.varlen_decode = CUDAGraphMode.FULL_AND_PIECEWISE, 1, False
    manager.max_num_reqs, manager.ubatch_runner, manager.lora_capture_cases = places, None, [0, 4]
    manager._lora_dispatch_map, manager._max_lora_case = manager._build_lora_dispatch_map()
    manager._candidates, manager._capture_descs, manager._graphs_captured = {}, {}, True
    manager._init_candidates()
    return manager


@pytest.mark.parametrize(("places", "largest"), [(1033, 2066), (1033, 1033), (265, 2048), (265, 265)])
def test_vllm_finds_a_graph_for_every_step_that_it_is_to_find_one_for(places: int, largest: int) -> None:
    manager = manager_of(capture_sizes(OF_VLLM, largest, places), places)
    decoding = {manager.dispatch(n, n, 1, num_active_loras=1).cg_mode for n in range(1, places + 1)}
    mixed = {manager.dispatch(2, n, None, num_active_loras=2).cg_mode for n in range(2, max(largest, 512) + 1)}
    assert (decoding, mixed) == ({CUDAGraphMode.FULL}, {CUDAGraphMode.PIECEWISE})
    assert sum(map(len, manager._capture_descs.values())) <= 1.27 * sum(
        map(len, manager_of(OF_VLLM, places)._capture_descs.values())
    ), "graphs to capture, at most a quarter more"


def test_of_vllms_own_sizes_none_serves_a_full_step() -> None:
    for places in (1033, 265):
        assert manager_of(OF_VLLM, places).dispatch(places, places, 1, num_active_loras=1).cg_mode != CUDAGraphMode.FULL
