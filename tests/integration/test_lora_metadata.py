"""The LoRA metadata of a step beside vLLM's own, in the buffers of its wrappers for GPUs and for CPUs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_cpu, punica_gpu
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState

from producer.engine import lora_metadata

pytestmark = pytest.mark.integration

MOST_TOKENS, VOCABULARY = 64, 1000
ADAPTERS = (0, 3, 5, 70_000, 2**31 - 1)  # 0 is none
WRAPPERS = ("PunicaWrapperGPU", "PunicaWrapperCPU")

Request = tuple[int, int]


@pytest.fixture(autouse=True, scope="module")
def metadata_of_kernels() -> Iterator[None]:
    """vLLM does not import what describes tokens of Triton kernels where there are none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
        yield


def wrapper_of(kind: str, max_loras: int, *, specialized: bool = False, device: str = "cpu") -> Any:
    lora_config = SimpleNamespace(max_loras=max_loras, specialize_active_lora=specialized)
    module: Any = punica_gpu if kind == "PunicaWrapperGPU" else punica_cpu
    wrapper = getattr(module, kind)(MOST_TOKENS, 16, torch.device(device), lora_config=lora_config)
    for buffer in tensors_of(wrapper).values():
        buffer.fill_(77)  # what a test compares it has written
    return wrapper


def runner_of(wrapper: Any, state: LoraState | None = None) -> Any:
    manager = SimpleNamespace(punica_wrapper_mapping={"model": wrapper})
    return SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager), lora_state=state)


def tensors_of(owner: Any) -> dict[str, torch.Tensor]:
    """All tensors of a wrapper, and of the metadata of its kernels."""
    own = {name: value for name, value in vars(owner).items() if isinstance(value, torch.Tensor)}
    for name, value in vars(owner).items():
        if isinstance(value, LoRAKernelMeta):
            own |= {f"{name}.{field}": tensor for field, tensor in tensors_of(value).items()}
    return own


def content_of(wrapper: Any) -> dict[str, Any]:
    numbers = {name: value for name, value in vars(wrapper).items() if isinstance(value, int | list)}
    return {name: tensor.tolist() for name, tensor in tensors_of(wrapper).items()} | numbers


def state_of(requests: list[Request]) -> LoraState:
    state = LoraState(len(requests) + 1)
    for row, (adapter, _) in enumerate(requests):
        state.add_request(f"r{row}", row, LoRARequest(f"v{adapter}", adapter, "/nowhere") if adapter else None)
    return state


def step(
    state: LoraState, wrapper: Any, requests: list[Request], slots: list[int | None]
) -> tuple[LoRAMapping, set[Any]]:
    """Do what vLLM does with the requests of a step, which may be in any rows of its batch."""
    ids = [f"r{row}" for row in range(len(requests))]
    num_tokens = np.array([tokens for _, tokens in requests], dtype=np.int32)
    per_request, per_token, adapters = state.make_lora_inputs(ids, np.arange(len(requests)), num_tokens)
    mapping = LoRAMapping(per_token, per_request, is_prefill=True)
    wrapper.update_metadata(mapping, slots, len(slots) + 1, VOCABULARY)
    return mapping, adapters


REQUESTS = st.lists(st.tuples(st.sampled_from(ADAPTERS), st.integers(1, 4)), min_size=1, max_size=16)


@pytest.mark.parametrize("kind", WRAPPERS)
@given(st.lists(REQUESTS, min_size=1, max_size=3), st.permutations([None, *ADAPTERS[1:]]), st.booleans())
def test_the_buffers_hold_what_vllm_writes_step_after_step(
    kind: str, steps: list[list[Request]], slots: list[int | None], specialized: bool
) -> None:
    theirs, ours = (wrapper_of(kind, len(slots), specialized=specialized) for _ in range(2))
    for requests in steps:
        own, state = state_of(requests), state_of(requests)
        lora_metadata.install(runner_of(ours, state))
        _, expected = step(own, theirs, requests, slots)
        mapping, adapters = step(state, ours, requests, slots)
        assert isinstance(mapping.index_mapping[0], bytes)
        assert adapters == expected
        assert content_of(ours) == content_of(theirs)


@pytest.mark.parametrize("kind", WRAPPERS)
@given(
    st.lists(st.sampled_from(ADAPTERS), max_size=MOST_TOKENS),
    st.lists(st.sampled_from(ADAPTERS), max_size=MOST_TOKENS),
    st.booleans(),
)
def test_mappings_that_vllm_makes_are_read_too(
    kind: str, tokens: list[int], samples: list[int], is_prefill: bool
) -> None:
    """As its dummy batches have them, and speculative decoding, which samples several tokens of a request."""
    theirs, ours = (wrapper_of(kind, len(ADAPTERS)) for _ in range(2))
    lora_metadata.install(runner_of(ours))
    mapping = LoRAMapping(tuple(tokens), tuple(samples), is_prefill=is_prefill and bool(tokens))
    for wrapper in (theirs, ours):
        wrapper.update_metadata(mapping, [*ADAPTERS[1:], None], len(ADAPTERS) + 1, VOCABULARY)
    assert content_of(ours) == content_of(theirs)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_adapter_without_a_slot_is_an_error_and_not_the_base(kind: str) -> None:
    requests = [(3, 2)]
    for replaced in (False, True):
        wrapper, state = wrapper_of(kind, 2), state_of(requests)
        if replaced:
            lora_metadata.install(runner_of(wrapper, state))
        with pytest.raises(KeyError):
            step(state, wrapper, requests, [5, None])


def test_vllm_sees_whether_a_step_has_the_mapping_of_the_last() -> None:
    wrapper = wrapper_of("PunicaWrapperGPU", 2)
    mappings = []
    for requests in ([(3, 1), (5, 2)], [(3, 1), (5, 2)], [(3, 2), (5, 1)], [(5, 1), (3, 2)]):
        state = state_of(requests)
        lora_metadata.install(runner_of(wrapper, state))
        mappings.append(step(state, wrapper, requests, [3, 5])[0])
    same, *others = mappings[1:]
    assert mappings[0] == same
    assert all(other != same for other in [*others, LoRAMapping((3, 5, 5), (3, 5), is_prefill=True)])


@pytest.mark.parametrize("missing", ["_embeddings_indices", "prompt_mapping_meta", "lora_requests"])
def test_where_vllm_lacks_a_name_its_own_code_stays(missing: str) -> None:
    wrapper, state = wrapper_of("PunicaWrapperGPU", 2), state_of([(3, 1)])
    for owner in (wrapper, state):
        if hasattr(owner, missing):
            delattr(owner, missing)
    lora_metadata.install(runner_of(wrapper, state))
    assert {"update_metadata", "make_lora_inputs"} & {*vars(wrapper), *vars(state)} == set()
