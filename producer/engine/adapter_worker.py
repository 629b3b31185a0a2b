"""Loading LoRA adapters inside vLLM's worker processes (`swap.mode: adapter`) without holding up the steps.

Guarantee: an adapter is read in a thread; between two engine steps there is only the copy into the layers. An adapter that vLLM
would serve in part is refused. vLLM's code for CPUs copies an adapter's matrices for every token of a step: here each adapter is
multiplied once with all tokens that name it. (vLLM's objects are used by their attributes: there is no import.)
"""

import os
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

import torch

from protocol.errors import is_out_of_memory

State = tuple[Literal["running", "done", "refused", "failed"], str]
"""The state of a load. "refused" and "failed" have a reason, and "failed" may pass. vLLM carries it between processes as it
is."""

DONE: State = ("done", "")
_NICENESS = 10
_NO_HOST_MEMORY = "can't allocate memory"  # in a RuntimeError of torch


class PartlyServedError(Exception):
    """A part of this adapter would not be served, which would be another policy."""


class BackgroundWork:
    """Work of a thread beside the engine's steps."""

    def __init__(self) -> None:
        self.state = DONE
        self.thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> None:
        self.state = ("running", "")
        self.thread = threading.Thread(target=self._run, args=(work,), name="prepare-policy", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            if not torch.cuda.is_available():
                # Decoding needs the cores first. On a GPU it needs the GIL, which a thread of low priority on full cores holds
                # for long.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            work()
            self.state = DONE
        except Exception as error:
            self.state = state_after(error)


def state_after(error: Exception) -> State:
    """Tell a wrong adapter from a machine that has no room for it now."""
    if isinstance(error, PartlyServedError):
        return "refused", str(error)
    may_pass = isinstance(error, OSError | MemoryError) or is_out_of_memory(error) or _NO_HOST_MEMORY in str(error)
    return "failed" if may_pass else "refused", f"{type(error).__name__}: {error}"


class AdapterWorker:
    """The methods that vLLM adds to its workers (`worker_extension_cls`), for `producer.engine.weights.AdapterWeights`."""

    def loading_start(self) -> None:
        self._loading = AdapterLoader(self.model_runner.lora_manager)  # type: ignore[attr-defined]

    def loading_prepare(self, request: tuple[str, int, str]) -> None:
        from vllm.lora.request import LoRARequest

        self._loading.prepare(LoRARequest(*request))

    def loading_state(self) -> State:
        """Return the state of the last `loading_prepare`: "done" once the layers have the adapter."""
        return self._loading.finish(self.add_lora)  # type: ignore[attr-defined]


class AdapterLoader(BackgroundWork):
    """A stage before the loader of vLLM's LoRA manager, which then finds each adapter read."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._load, self._served = manager._load_adapter, manager._adapter_manager
        self._request: Any = None  # vLLM's LoRARequest
        self._ready: dict[int, Any] = {}
        manager._load_adapter = self._take
        for wrapper in manager._adapter_manager.punica_wrapper_mapping.values():
            if type(wrapper).__name__ == "PunicaWrapperCPU":
                CpuLora(wrapper)

    def prepare(self, request: Any) -> None:
        self._request = request
        self.begin(self._read)

    def _read(self) -> None:
        adapter = self._load(self._request)
        served = {*self._served.modules, *chain(*self._served.packed_modules.values())}
        kinds = {leaf(name) for name in served}
        # Experts have other names in vLLM; a worker of a pipeline has some of the layers.
        unserved = [name for name in adapter.loras if leaf(name) not in kinds and ".experts" not in name]
        if unserved:
            raise PartlyServedError(
                f"vLLM serves no adapter of {', '.join(sorted(unserved)[:3])}; check lora.target_modules of the producer"
            )
        self._ready = {self._request.lora_int_id: adapter}

    def finish(self, add: Callable[[Any], bool]) -> State:
        """Hand the adapter to vLLM, once it is read, and return the state. Called between two steps."""
        if self.state == DONE and self._request is not None:
            request, self._request = self._request, None
            try:
                self.state = DONE if add(request) else ("refused", "vLLM did not load it and gives no reason")
            except Exception as error:
                self.state = state_after(error)
        return self.state

    def _take(self, request: Any) -> Any:
        read = self._ready.pop(request.lora_int_id, None)
        return self._load(request) if read is None else read


def leaf(module: str) -> str:
    """Return the last part of a module's name."""
    return module.rpartition(".")[2]


class CpuLora:
    """The arithmetic of a vLLM `PunicaWrapperCPU`, replaced: T tokens of a step, A slots of adapters."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._update = wrapper.update_metadata
        self._groups: list[tuple[int, slice | torch.Tensor]] = []
        wrapper.update_metadata = self.update_metadata
        wrapper._apply_shrink, wrapper._apply_expand = self.shrink, self.expand
        wrapper.add_lora_logits = self.add_to_logits

    def update_metadata(self, *arguments: Any, **keywords: Any) -> None:
        """Note the adapters of the next step's tokens, which differ from those of the last step."""
        self._update(*arguments, **keywords)
        self._groups = groups_of(self._wrapper.token_lora_indices)

    def shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        """Compute y (T, rank) = scale * x (T, inputs) @ the transposed matrix of each token in w_t_all (A, 1, rank, inputs)."""
        for adapter, tokens in self._groups:
            y[tokens] = scale * (x[tokens].to(y.dtype) @ w_t_all[adapter, 0].to(y.dtype).t())

    def expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        """Add x (T, rank) @ the transposed matrix of each token in w_t_all (A, 1, y_slice_size, rank) to y (T, outputs), from
        column `y_offset` on."""
        part = y[:, y_offset : y_offset + y_slice_size]
        if not add_inputs:
            part.zero_()
        for adapter, tokens in self._groups:
            part[tokens] += x[tokens].to(y.dtype) @ w_t_all[adapter, 0].to(y.dtype).t()

    def add_to_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        """Add the head's adapter to the logits of sampled rows. vLLM also passes rows of a scored prompt, without their adapters,
        at which its own code ends the engine. Only an adapter of the head would change them, and the configuration refuses to
        score under one."""
        sampled = self._wrapper.sampler_indices
        if len(x) == len(sampled):
            part = y[:, : lora_b_stacked.shape[-2]]  # either may be padded
            for adapter, rows in groups_of(sampled):
                between = scale * (x[rows].float() @ lora_a_stacked[adapter, 0].float().t())
                part[rows] += (between @ lora_b_stacked[adapter, 0, : part.shape[1]].float().t()).to(y.dtype)


def groups_of(adapters: torch.Tensor) -> "list[tuple[int, slice | torch.Tensor]]":
    """Return each slot in `adapters` (T,) with its tokens; -1 is no slot."""
    slots = adapters.unique().tolist()
    if len(slots) == 1:
        return [(slot, slice(None)) for slot in slots if slot >= 0]
    return [(slot, (adapters == slot).nonzero().squeeze(1)) for slot in slots if slot >= 0]
