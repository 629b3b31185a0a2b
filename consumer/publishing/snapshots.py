"""The trainable weights of a moment as an adapter blob in host memory.

Guarantee: a snapshot is the plain PEFT adapter that `save_pretrained` would write, packed, of the moment of `take`, while
training goes on. `take` does no more than copy the tensors to where they belong in the blob; under CUDA it does not even
wait for that. Buffers are used again, so that no version pays for fresh memory.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save

from consumer.publishing.probe import Measurement
from consumer.publishing.published_policy import NO_PROBE, MeasuredProbe, PublishedPolicy
from protocol.wire.adapter_blob import AdapterBlob, pack

_ALIGNMENT_BYTES = 16  # at least that of every dtype


class AdapterSnapshot:
    """A `consumer.publishing.published_policy.Snapshot` of an adapter."""

    def __init__(
        self,
        blob: torch.Tensor,
        copied: torch.cuda.Event | None,
        release: Callable[[], None],
        probe: Measurement | None = None,
    ) -> None:
        self._blob = blob
        self._copied = copied
        self._probe = probe
        self.release = release

    @property
    def data(self) -> memoryview:
        """Waits until everything is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return memoryview(self._blob.numpy())

    def published(self, version: int) -> PublishedPolicy:
        data, probe = self.data, NO_PROBE
        if self._probe is not None:
            token_ids, logprobs = self._probe.token_ids.astype("<i4"), self._probe.logprobs.numpy().astype("<f4")
            probe = MeasuredProbe(token_ids.tobytes(), logprobs.tobytes())
        return PublishedPolicy(version, hashlib.sha256(data).hexdigest(), data, probe, self.release)


class AdapterSnapshots:
    """Takes snapshots of the adapter named `default` of `model`, whose layout stays as it is.

    `take` belongs to the thread that trains; any thread may release.
    """

    def __init__(self, model: PeftModel) -> None:
        state = get_peft_model_state_dict(model, adapter_name="default")
        by_address = {parameter.data_ptr(): parameter for parameter in model.parameters()}
        self._parameters = {name: by_address[tensor.data_ptr()] for name, tensor in state.items()}
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
        settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
        file = save(tensors)
        config_json = json.dumps(settings, default=_plain, sort_keys=True).encode()
        blob, _ = pack(AdapterBlob(config_json, file))
        assert blob.endswith(file), "the tensors are the last part of a blob"
        header_bytes = 8 + int.from_bytes(file[:8], "little")
        self._head = blob[: len(blob) - len(file) + header_bytes]
        self._num_bytes = len(blob)
        self._places = {name: one["data_offsets"][0] for name, one in json.loads(file[8:header_bytes]).items()}
        self._on_gpu = next(iter(self._parameters.values())).is_cuda
        self._free: deque[tuple[torch.Tensor, list[torch.Tensor]]] = deque()

    def take(self, probe: Measurement | None = None) -> AdapterSnapshot:
        """
        Args:
            probe: of the present policy; travels with it.
        """
        try:
            blob, places = self._free.popleft()
        except IndexError:
            blob, places = self._new_buffer()
        with torch.no_grad():
            torch._foreach_copy_(places, list(self._parameters.values()), non_blocking=self._on_gpu)
        copied = None
        if probe is not None:
            logprobs = torch.empty(probe.logprobs.shape, dtype=torch.float32, pin_memory=self._on_gpu)
            probe = probe._replace(logprobs=logprobs.copy_(probe.logprobs, non_blocking=self._on_gpu))
        if self._on_gpu:
            copied = torch.cuda.Event()
            copied.record()
        return AdapterSnapshot(blob, copied, lambda: self._free.append((blob, places)), probe)

    def _new_buffer(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A blob without numbers, and the place of every parameter in it."""
        head = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        padding = -len(head) % _ALIGNMENT_BYTES
        buffer = torch.zeros(padding + self._num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        blob = buffer[padding:]
        blob[: len(head)] = head
        places = []
        for name, parameter in self._parameters.items():
            start = len(head) + self._places[name]
            flat = blob[start : start + parameter.numel() * parameter.element_size()]
            places.append(flat.view(parameter.dtype).view(parameter.shape))
        return blob, places


def _plain(value: Any) -> Any:
    """PEFT keeps module names in sets and kinds in enums."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(getattr(value, "value", value))
