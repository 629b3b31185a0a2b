"""Snapshots of a model whose own weights train, published as patches of the checkpoint that the run began with.

Guarantee: a patch leads from that checkpoint, in bfloat16, to the rounding of the weights of the moment of `take`, bit for bit,
while training goes on. Equal weights give equal patches. Of weights that ranks share all ranks gather one parameter at a time,
rounded, and call `take` and `gather_weights` in the same order. The host keeps 2 bytes per trained parameter for the checkpoint,
and as many for each snapshot at a time. Comparing and packing happen on the publisher's thread. Formats:
`protocol.wire.weight_patch`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from consumer.link.policy_store import PublishedPolicy
from consumer.link.probe import Measurement
from consumer.link.snapshots import lies_on_gpu
from protocol.errors import ConfigError
from protocol.gpu.model_files import weights_of
from protocol.wire.patch_streams import PER_WORD, TwoWeights, Words, element_sum, patch_between
from protocol.wire.weight_patch import WeightPatch, pack


class _Place(NamedTuple):
    """The elements of a tensor in a buffer, up to the next whole word."""

    start: int
    size: int

    @property
    def words(self) -> slice:
        return slice(self.start // PER_WORD, -(-(self.start + self.size) // PER_WORD))


@dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """A `consumer.link.policy_store.Snapshot` of weights."""

    owner: "WeightSnapshots"
    weights: torch.Tensor
    copied: torch.cuda.Event | None
    release: Callable[[], None]
    probe: Measurement | None = None

    def published(self, version: int) -> PublishedPolicy:
        if self.copied is not None:
            self.copied.synchronize()
        data, digest = pack(self.owner.patch(self.weights))
        self.release()  # the patch is a copy
        return PublishedPolicy(version, digest, data, self.probe and self.probe.probe())


class WeightSnapshots:
    """The maker of snapshots of `model`, whose parameters that train are now as they were loaded.

    `take` belongs to the thread that trains; any thread may release.
    """

    def __init__(self, model: Any) -> None:
        self._parameters = dict(_trained(model))
        self._places: dict[str, _Place] = {}
        self._length = 0
        for name, parameter in self._parameters.items():
            self._places[name] = _Place(self._length, parameter.numel())
            self._length += -(-parameter.numel() // PER_WORD) * PER_WORD
        self._is_pinned = torch.cuda.is_available()
        self._free: deque[torch.Tensor] = deque()
        self._loaded = self._new_buffer()
        self._copy_to(self._loaded)
        if lies_on_gpu(self._parameters.values()):
            torch.cuda.synchronize()
        loaded = _words(self._loaded)
        self._sums = {name: element_sum(loaded[place.words]) for name, place in self._places.items()}

    def take(self, probe: Measurement | None = None) -> WeightSnapshot:
        """Copy the weights of now, rounded to bfloat16; the probe of the present policy travels with them."""
        try:
            buffer = self._free.popleft()
        except IndexError:
            buffer = self._new_buffer()
        self._copy_to(buffer)
        copied = None
        if lies_on_gpu(self._parameters.values()):
            copied = torch.cuda.Event()
            copied.record()
        return WeightSnapshot(self, buffer, copied, lambda: self._free.append(buffer), probe)

    def patch(self, weights: torch.Tensor) -> WeightPatch:
        """Return the patch that makes `weights` of the loaded ones."""
        old, new = _words(self._loaded), _words(weights)
        return patch_between(
            TwoWeights(name, self._parameters[name].shape, old[place.words], new[place.words], self._sums[name])
            for name, place in self._places.items()
        )

    def _new_buffer(self) -> torch.Tensor:
        return torch.zeros(self._length, dtype=torch.bfloat16, pin_memory=self._is_pinned)

    def _copy_to(self, buffer: torch.Tensor) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                start, size = self._places[name]
                values = whole(parameter, torch.bfloat16)
                buffer[start : start + size].view(parameter.shape).copy_(values, non_blocking=True)


def _words(buffer: torch.Tensor) -> Words:
    words: Words = buffer.view(torch.int64).numpy().view(np.uint64)
    return words


def whole(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return all of a tensor that ranks share, gathered in this type; another one as it is. All ranks call it."""
    return tensor.to(dtype or tensor.dtype).full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_weights(model: Any) -> None:
    """Take part, on another rank, in the making of a snapshot."""
    with torch.no_grad():
        for _, parameter in _trained(model):
            whole(parameter, torch.bfloat16)


def check_names(model: Any, folder: Path) -> None:
    """Refuse a model whose parameters that train are not tensors of its checkpoint, by name and shape.

    Raises:
        ConfigError: names the first that is not.
    """
    known = {weight.name: weight.shape for weight in weights_of(folder)}
    for name, parameter in _trained(model):
        if known.get(name) != tuple(parameter.shape):
            raise ConfigError(
                f"lora: null: the checkpoint in {folder} has no tensor {name} of shape {list(parameter.shape)}, so no patch can "
                "name what changes; train an adapter"
            )


def _trained(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)
