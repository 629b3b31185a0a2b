"""The LoRA metadata of a step, which vLLM's kernels read: the slot of each token's adapter, and the tokens of each slot.

Guarantee: the buffers hold what vLLM's own code writes there. That code loops in Python over the tokens of a step, and waits for
the GPU. Here numpy computes all of it, and it goes to the device in one copy, for which nothing waits. If vLLM lacks a name that
is used here, its own code stays.
"""

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
Mapping = tuple[Any, ...]

_INDICES = attrgetter("_token_lora_indices", "_sampler_indices", "_sampler_indices_padded", "_embeddings_indices")
_KERNEL_BUFFERS = attrgetter(
    "token_lora_mapping",
    "token_indices_sorted_by_lora_ids",
    "active_lora_ids",
    "num_tokens_per_lora",
    "lora_token_start_loc",
)
_KERNEL_FACTS = attrgetter("no_lora_flag_cpu", "num_active_loras_cpu", "captured_lora_counts")


def install(runner: Any) -> None:
    """Replace both ends of a mapping's path through a vLLM model runner: where it is made, and where punica wrappers read it."""
    wrappers = runner.lora_manager._adapter_manager.punica_wrapper_mapping.values()
    with suppress(AttributeError, ImportError):
        steps = [StepMetadata(wrapper) for wrapper in wrappers]
        if state := getattr(runner, "lora_state", None):  # of Model Runner V2
            state.make_lora_inputs = mapping_maker(state)
        for step in steps:
            step.install()


def mapping_maker(state: Any) -> Callable[[list[str], Array, Array], tuple[Mapping, Mapping, set[Any]]]:
    """Return a `make_lora_inputs` for vLLM's `LoraState` whose mappings are a few bytes. vLLM compares mappings and hands
    them on, no more."""
    ids_by_row, requests, _ = state.lora_ids, state.lora_requests, state.make_lora_inputs

    def make(request_ids: list[str], rows: Array, num_tokens: Array) -> tuple[Mapping, Mapping, set[Any]]:
        ids = ids_by_row[rows]
        present, first = np.unique(ids, return_index=True)
        per_request = ids.astype(np.int64).tobytes()
        per_token = per_request, num_tokens.astype(np.int64).tobytes()
        return (per_request,), per_token, {requests[request_ids[place]] for place in first[present > 0]}

    return make


def slots_of(mapping: Mapping, adapters: list[int | None]) -> Array:
    """Return the slot of each id in a mapping, and -1 for no adapter. `adapters` has the id of each slot. A mapping of vLLM's
    has the ids themselves. Raise KeyError for an adapter without a slot."""
    if mapping and isinstance(mapping[0], bytes):
        ids, *num_tokens = (np.frombuffer(part, dtype=np.int64) for part in mapping)
    else:
        ids, num_tokens = np.array(mapping, dtype=np.int64), []
    slots = np.full(len(ids), -1)
    for slot, adapter in enumerate(adapters):
        if adapter is not None:
            slots[ids == adapter] = slot
    if (missing := ids[(slots < 0) & (ids > 0)]).size:
        raise KeyError(int(missing[0]))
    return slots.repeat(num_tokens[0]) if num_tokens else slots


def kernel_parts(slots: Array, num_groups: int) -> tuple[int, list[Array]]:
    """Return the number of groups, and what a vLLM `LoRAKernelMeta` holds of them. The rows of a slot are a group, as are those
    without an adapter. If no row has an adapter, there is no group, and the kernels do not run."""
    counts = np.bincount(slots + 1, minlength=num_groups)
    groups = np.flatnonzero(counts)
    if len(groups) == 0 or groups[-1] == 0:
        groups, slots = groups[:0], slots[:0]
    number = len(groups)
    active, sizes, starts = (
        np.full(num_groups, -1),
        np.zeros(num_groups, dtype=int),
        np.zeros(num_groups + 1, dtype=int),
    )
    active[:number], sizes[:number] = groups - 1, counts[groups]
    starts[1 : number + 1] = sizes[:number].cumsum()
    return number, [slots, slots.argsort(kind="stable"), active, sizes, starts]


class StepMetadata:
    """The buffers of a vLLM punica wrapper, and on a GPU those of its kernels, which they read at fixed addresses."""

    def __init__(self, wrapper: Any) -> None:
        from vllm.utils.torch_utils import async_tensor_h2d

        self._wrapper, self._lengths = wrapper, wrapper.indices_len
        self._copy, self._device = async_tensor_h2d, wrapper.device
        on_gpu = type(wrapper).__name__ == "PunicaWrapperGPU"
        self._replaced = "update_metadata" if on_gpu else "_update_base_metadata"
        attrgetter(self._replaced)(wrapper)
        metas = [wrapper.token_mapping_meta, wrapper.prompt_mapping_meta] if on_gpu else []
        self._facts = [(len(meta.active_lora_ids), *_KERNEL_FACTS(meta)) for meta in metas]
        self._buffers = [*_INDICES(wrapper), *(buffer for meta in metas for buffer in _KERNEL_BUFFERS(meta))]

    def install(self) -> None:
        setattr(self._wrapper, self._replaced, self.update)

    def update(self, mapping: Any, adapters: list[int | None], max_loras: int, vocab_size: int, **_: Any) -> None:
        """Fill the buffers for the next step, as vLLM's function with these arguments does."""
        tokens, samples = slots_of(mapping.index_mapping, adapters), slots_of(mapping.prompt_mapping, adapters)
        padded = np.arange(len(samples)) + np.where(samples < 0, max_loras - 1, samples) * len(samples)
        parts = [tokens, samples, padded, np.maximum(tokens, 0) * vocab_size]
        self._lengths[:] = map(len, parts)
        self._wrapper.is_prefill = mapping.is_prefill
        for (num_groups, has_none, num_active, captured), slots in zip(self._facts, (tokens, samples), strict=False):
            number, of_kernels = kernel_parts(slots, num_groups)
            has_none[0] = number == 0
            num_active[0] = number and next((count for count in captured if count >= number), number)
            parts += of_kernels
        copied = self._copy(np.concatenate(parts), device=self._device).split([len(part) for part in parts])
        filled = [buffer[: len(part)] for buffer, part in zip(self._buffers, parts, strict=True)]
        torch._foreach_copy_(filled[:4], copied[:4])
        if self._facts:  # buffers of another type
            torch._foreach_copy_(filled[4:], copied[4:])
