"""Snapshots of a model whose own weights train, or whose adapter is merged into them, published as patches of the checkpoint.

Guarantee: a patch leads from that checkpoint, in bfloat16, to the rounding of the weights of the moment of `take`, bit for bit,
while training goes on. Equal weights give equal patches. Of weights that ranks share all ranks gather one parameter at a time,
rounded, and call `take` and `gather_weights` in the same order. An adapter is merged one tensor at a time. The host keeps 2 bytes
per element of the tensors that change for the checkpoint, and as many for each snapshot at a time. Comparing and packing happen
on the publisher's thread. Formats: `protocol.wire.weight_patch`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor

from consumer.link.merging import PublishedWeight, merged_weights
from consumer.link.policy_store import PublishedPolicy
from consumer.link.probe import Measurement
from consumer.link.snapshots import lies_on_gpu
from protocol.errors import ConfigError
from protocol.gpu.model_files import weights_of
from protocol.wire.patch_streams import PER_WORD, TwoWeights, Words, element_sum, patch_between
from protocol.wire.weight_patch import WeightPatch, pack

logger = logging.getLogger(__name__)

_COLUMNS = 8  # of each merged tensor, in which the loss by rounding is measured; others for each snapshot
_LEAST_SURVIVAL = 0.5  # as the producer's, for adapters that engines merge


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
    survival: torch.Tensor | None = None

    def published(self, version: int) -> PublishedPolicy:
        if self.copied is not None:
            self.copied.synchronize()
        if self.survival is not None:
            self.owner.note_survival(version, *self.survival.tolist())
        data, digest = pack(self.owner.patch(self.weights))
        self.release()  # the patch is a copy
        return PublishedPolicy(version, digest, data, self.probe and self.probe.probe())


class WeightSnapshots:
    """The maker of snapshots of `model`, whose parameters that train without an adapter are now as they were loaded.

    `take` belongs to the thread that trains; any thread may release.
    """

    def __init__(self, model: Any) -> None:
        self._weights = list(published_weights(model))
        self._places: dict[str, _Place] = {}
        self._length = 0
        for each in self._weights:
            size = each.shape.numel()
            self._places[each.name] = _Place(self._length, size)
            self._length += -(-size // PER_WORD) * PER_WORD
        self._is_pinned = torch.cuda.is_available()
        self._model = model
        self._free: deque[torch.Tensor] = deque()
        self._num_taken = 0
        self._has_warned = False
        self._loaded = self._new_buffer()
        with torch.no_grad():
            for each in self._weights:
                self._part(self._loaded, each).copy_(each.base(), non_blocking=True)
        if self._on_gpu:
            torch.cuda.synchronize()
        loaded = _words(self._loaded)
        self._sums = {name: element_sum(loaded[place.words]) for name, place in self._places.items()}

    @property
    def _on_gpu(self) -> bool:
        return lies_on_gpu(self._model.parameters())

    def take(self, probe: Measurement | None = None) -> WeightSnapshot:
        """Copy the weights of now, rounded to bfloat16; the probe of the present policy travels with them."""
        try:
            buffer = self._free.popleft()
        except IndexError:
            buffer = self._new_buffer()
        survival = self._copy_to(buffer)
        copied = None
        if self._on_gpu:
            copied = torch.cuda.Event()
            copied.record()
        return WeightSnapshot(self, buffer, copied, lambda: self._free.append(buffer), probe, survival)

    def patch(self, weights: torch.Tensor) -> WeightPatch:
        """Return the patch that makes `weights` of the loaded ones."""
        old, new = _words(self._loaded), _words(weights)
        return patch_between(
            TwoWeights(each.name, each.shape, old[place.words], new[place.words], self._sums[each.name])
            for each, place in ((each, self._places[each.name]) for each in self._weights)
        )

    def note_survival(self, version: int, left: float, whole: float) -> None:
        """Warn once where rounding leaves little of what the adapter changes: S = left / whole, as `producer.engine.merged_proof`
        has it."""
        if whole > 0 and left / whole < _LEAST_SURVIVAL and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the weights of policy v%d have %.0f %% of the update of its adapter, because bfloat16 rounds the rest away "
                "until it has grown; raise trainer.learning_rate, or train an adapter that vLLM serves",
                version, 100 * left / whole,
            )  # fmt: skip

    def _part(self, buffer: torch.Tensor, weight: PublishedWeight) -> torch.Tensor:
        start, size = self._places[weight.name]
        return buffer[start : start + size].view(weight.shape)

    def _new_buffer(self) -> torch.Tensor:
        return torch.zeros(self._length, dtype=torch.bfloat16, pin_memory=self._is_pinned)

    def _copy_to(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """Copy the weights of now. Return the two sums of which `note_survival` makes a share, None without merged weights."""
        sums = []
        self._num_taken += 1
        with torch.no_grad():
            for each in self._weights:
                values = each.now()
                self._part(buffer, each).copy_(values, non_blocking=True)
                if each.merged:
                    sums.append(_survival(values, each.base(), self._num_taken))
        if not sums:
            return None
        total = torch.stack(sums).sum(0)
        return torch.empty(2, dtype=total.dtype, pin_memory=self._is_pinned).copy_(total, non_blocking=self._on_gpu)


def _survival(merged: torch.Tensor, base: torch.Tensor, number: int) -> torch.Tensor:
    """Return sum((round(M) - W) (M - W)) and sum((M - W)^2) of some columns."""
    width = merged.shape[1]
    columns = slice(number % max(1, width // _COLUMNS), None, max(1, width // _COLUMNS))
    part, before = merged[:, columns], base[:, columns].to(merged.dtype)
    update = part - before
    left = (part.to(torch.bfloat16).to(merged.dtype) - before) * update
    return torch.stack([left.sum(), update.square().sum()])


def _words(buffer: torch.Tensor) -> Words:
    words: Words = buffer.view(torch.int64).numpy().view(np.uint64)
    return words


def whole(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return all of a tensor that ranks share, gathered in this type; another one as it is. All ranks call it."""
    return tensor.to(dtype or tensor.dtype).full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_weights(model: Any) -> None:
    """Take part, on another rank, in the making of a snapshot."""
    with torch.no_grad():
        for each in published_weights(model):
            each.now()


def check_names(model: Any, folder: Path) -> None:
    """Refuse a model whose weights that change are not tensors of its checkpoint, by name and shape.

    Raises:
        ConfigError: names the first that is not.
    """
    known = {weight.name: weight.shape for weight in weights_of(folder)}
    key, fix = ("lora: null", "train an adapter")
    if isinstance(model, PeftModel):
        key, fix = "lora", "take its module out, or train an adapter that vLLM serves"
    for each in published_weights(model):
        if known.get(each.name) != tuple(each.shape):
            raise ConfigError(
                f"{key}: the checkpoint in {folder} has no tensor {each.name} of shape {list(each.shape)}, so no patch can name "
                f"what changes; {fix}"
            )


def published_weights(model: Any) -> Iterator[PublishedWeight]:
    """Yield the weights that training changes: those that train themselves, or those into which the adapter is merged."""
    if isinstance(model, PeftModel):
        yield from merged_weights(model)
        return
    for name, each in model.named_parameters():
        if each.requires_grad:
            values = partial(whole, each, torch.bfloat16)
            yield PublishedWeight(name, each.shape, values, values)
