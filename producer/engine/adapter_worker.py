"""Loading LoRA adapters inside vLLM's worker processes (`swap.mode: adapter`) without holding up the steps.

Guarantee: an adapter is read in a thread; between two engine steps there is only the copy into the layers. It counts as loaded
when the thread has compared the layers with the published files. An adapter that vLLM would serve in part is refused. vLLM's
code for CPUs copies an adapter's matrices for every token of a step: here each adapter is multiplied once with all tokens that
name it. (vLLM's objects are used by their attributes: there is no import.)
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from producer.engine import lora_metadata
from producer.engine.published import PartlyServedError, PublishedAdapter, read_published
from producer.engine.swap_proof import AdapterProof
from protocol.errors import is_out_of_memory
from protocol.wire.adapter_blob import BlobError

State = tuple[Literal["running", "done", "refused", "failed"], str]
"""The state of a load. "done" comes with the path of the adapter, or with nothing; "refused" and "failed" have a reason, and
"failed" may pass. vLLM carries it between processes as it is."""

DONE: State = ("done", "")
_NO_HOST_MEMORY = "can't allocate memory"  # in a RuntimeError of torch


class BackgroundWork:
    """Work of a thread beside the engine's steps. It has their priority: a lower one saves no step, because the work stays the
    same, and makes the swap several times as long on a core that decodes. The process waits for it at its end: Python ends the
    threads that it does not wait for, and torch's code aborts the process then."""

    def __init__(self) -> None:
        self.state = DONE
        self.thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None], done: str = "") -> None:
        """Run `work` in a thread; when it has returned, the state is "done" with this text."""
        self.state = ("running", "")
        self.thread = threading.Thread(target=self._run, args=(work, done), name="prepare-policy")
        self.thread.start()

    def _run(self, work: Callable[[], None], done: str) -> None:
        try:
            work()
            self.state = ("done", done)
        except Exception as error:
            self.state = state_after(error)


@contextmanager
def own_stream(device: torch.device, after: Any = None) -> Iterator[None]:
    """Run this thread's work on the device beside the engine's, after this event of it, and wait for it at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
        yield
        stream.synchronize()


def state_after(error: Exception) -> State:
    """Tell a wrong policy from a machine that has no room for it now."""
    if isinstance(error, PartlyServedError | BlobError):
        return "refused", str(error)
    may_pass = isinstance(error, OSError | MemoryError) or is_out_of_memory(error) or _NO_HOST_MEMORY in str(error)
    return "failed" if may_pass else "refused", f"{type(error).__name__}: {error}"


class AdapterWorker:
    """The methods that vLLM adds to its workers (`worker_extension_cls`), for `producer.engine.weights.AdapterWeights`."""

    def loading_start(self) -> None:
        lora_metadata.install(self.model_runner)  # type: ignore[attr-defined]
        self._loading = AdapterLoader(self.model_runner.lora_manager)  # type: ignore[attr-defined]

    def loading_prepare(self, request: tuple[str, int, str], checksum: int | None) -> None:
        """Begin to read the adapter of this name, id and path, whose files have this CRC-32 (None: any)."""
        from vllm.lora.request import LoRARequest

        self._loading.prepare(LoRARequest(*request), checksum)

    def loading_state(self) -> State:
        """Return the state of the last `loading_prepare`: "done" once the layers are proved to have the adapter."""
        return self._loading.advance(self.add_lora)  # type: ignore[attr-defined]


class AdapterLoader(BackgroundWork):
    """A stage before the loader of vLLM's LoRA manager, which then finds each adapter read, and the proof after it."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._load, self._proof = manager._load_adapter, AdapterProof(manager._adapter_manager)
        self._device = torch.device(manager.device)
        self._request: Any = None  # vLLM's LoRARequest, until vLLM has its adapter
        self._ready: dict[int, tuple[Any, PublishedAdapter]] = {}
        manager._load_adapter = self._take
        for wrapper in manager._adapter_manager.punica_wrapper_mapping.values():
            if type(wrapper).__name__ == "PunicaWrapperCPU":
                CpuLora(wrapper)

    def prepare(self, request: Any, checksum: int | None) -> None:
        self._request = request
        self.begin(lambda: self._read(request, checksum))

    def _read(self, request: Any, checksum: int | None) -> None:
        published = read_published(Path(request.lora_path), checksum)
        self._proof.check_modules(published)
        self._ready = {request.lora_int_id: (self._load(request), published)}

    def advance(self, add: Callable[[Any], bool]) -> State:
        """Hand the adapter to vLLM, once it is read, begin the proof, and return the state. Called between two steps."""
        if self.state == DONE and self._request is not None:
            request, self._request = self._request, None
            _, published = self._ready[request.lora_int_id]
            try:
                if add(request):
                    self._begin_proof(request, published)
                else:
                    self.state = ("refused", "vLLM did not load it and gives no reason")
            except Exception as error:
                self.state = state_after(error)
        return self.state

    def _begin_proof(self, request: Any, published: PublishedAdapter) -> None:
        copied = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

        def prove() -> None:
            with own_stream(self._device, copied):
                self._proof.compare(request.lora_int_id, published)

        self.begin(prove, request.lora_path)

    def _take(self, request: Any) -> Any:
        read = self._ready.pop(request.lora_int_id, None)
        return self._load(request) if read is None else read[0]


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
