"""Snapshot of the model for a version: its weights as an adapter blob in host memory, and the probe of a swap.

Guarantee: a snapshot is the plain PEFT adapter that `save_pretrained` would write, packed, of the moment of `take`, while
training goes on. `take` does no more than copy the tensors to where they belong in the blob; under CUDA it does not even
wait for that. Buffers are used again, so that no version pays for fresh memory.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save

from consumer.link.policy_store import PublishedPolicy
from consumer.link.probe import Measurement
from protocol.wire.adapter_blob import AdapterBlob, pack

_ALIGNMENT_BYTES = 16  # at least that of every dtype


@dataclass(frozen=True, eq=False)
class AdapterSnapshot:
    """A `consumer.link.policy_store.Snapshot` of an adapter."""

    blob: torch.Tensor
    copied: torch.cuda.Event | None
    release: Callable[[], None]
    probe: Measurement | None = None

    @property
    def data(self) -> memoryview:
        """Wait until everything is there."""
        if self.copied is not None:
            self.copied.synchronize()
        return memoryview(self.blob.numpy())

    def published(self, version: int) -> PublishedPolicy:
        data, probe = self.data, self.probe and self.probe.probe()
        return PublishedPolicy(version, hashlib.sha256(data).hexdigest(), data, probe, self.release)


class AdapterSnapshots:
    """The maker of snapshots of the adapter named `default` of `model`, whose layout stays as it is.

    `take` belongs to the thread that trains; any thread may release.
    """

    def __init__(self, model: PeftModel) -> None:
        # Embeddings below an adapter are those of the base, which an engine has.
        state = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
        by_address = {parameter.data_ptr(): parameter for parameter in model.parameters()}
        self._parameters = {name: by_address[tensor.data_ptr()] for name, tensor in state.items()}
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
        settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
        file = save(tensors)
        config_json = json.dumps(settings, default=_plain, sort_keys=True).encode()
        header_bytes = 8 + int.from_bytes(file[:8], "little")
        self._head, _ = pack(AdapterBlob(config_json, file[:header_bytes]))  # the tensors are the last part of a blob
        self._num_bytes = len(self._head) + len(file) - header_bytes
        self._places = {name: one["data_offsets"][0] for name, one in json.loads(file[8:header_bytes]).items()}
        self._is_pinned = torch.cuda.is_available()
        self._free: deque[tuple[torch.Tensor, list[torch.Tensor]]] = deque()

    def take(self, probe: Measurement | None = None) -> AdapterSnapshot:
        """Copy the weights of now; the probe of the present policy travels with them."""
        try:
            blob, places = self._free.popleft()
        except IndexError:
            blob, places = self._new_buffer()
        on_gpu = lies_on_gpu(self._parameters.values())
        with torch.no_grad():
            torch._foreach_copy_(places, list(self._parameters.values()), non_blocking=on_gpu)
        probe, copied = probe and probe.on_way_to_host(), None
        if on_gpu:
            copied = torch.cuda.Event()
            copied.record()
        return AdapterSnapshot(blob, copied, lambda: self._free.append((blob, places)), probe)

    def _new_buffer(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A blob without numbers, and the place of every parameter in it."""
        head = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        padding = -len(head) % _ALIGNMENT_BYTES
        buffer = torch.zeros(padding + self._num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        blob = buffer[padding:]
        blob[: len(head)] = head
        places = []
        for name, parameter in self._parameters.items():
            start = len(head) + self._places[name]
            flat = blob[start : start + parameter.numel() * parameter.element_size()]
            places.append(flat.view(parameter.dtype).view(parameter.shape))
        return blob, places


def lies_on_gpu(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether the parameters of a model are on a GPU now. Where that is used in turns, they come and go."""
    return any(parameter.is_cuda for parameter in parameters)


def _plain(value: Any) -> Any:
    """PEFT keeps module names in sets and kinds in enums."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(getattr(value, "value", value))
