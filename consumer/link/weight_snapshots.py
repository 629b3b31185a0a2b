"""Snapshots of a model whose own weights train, or whose adapter is merged into them, published as patches of the checkpoint.

Guarantee: a patch leads from that checkpoint, or from its anchor, in bfloat16, to the rounding of the weights of the moment of
`take`, bit for bit, while training goes on. Which it is depends on the snapshots taken before, and a run that goes on from a
checkpoint of its own makes the same patches. Of weights that ranks share all ranks gather one parameter at a time, rounded, and
call `take` and `gather_weights` in the same order. An adapter is merged one tensor at a time. The host keeps 2 bytes per element
of the tensors that change for each snapshot at a time, and what `PatchMaker` keeps. Comparing and packing happen on the
publisher's thread, or before a checkpoint.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor

from consumer.link.merging import PublishedWeight, merged_weights
from consumer.link.patch_maker import Blob, PatchMaker, Place
from consumer.link.policy_store import PublishedPolicy
from consumer.link.probe import Measurement
from consumer.link.snapshots import lies_on_gpu
from protocol.errors import ConfigError
from protocol.gpu.weights import weights_of
from protocol.wire.patch_streams import PER_WORD
from protocol.wire.weight_patch import WeightPatch

logger = logging.getLogger(__name__)

_COLUMNS = 8  # of each merged tensor, in which the loss by rounding is measured; others for each snapshot
_LEAST_SURVIVAL = 0.5  # as the producer's, for adapters that engines merge


@dataclass(eq=False)
class WeightSnapshot:
    """A `consumer.link.policy_store.Snapshot` of weights."""

    owner: "WeightSnapshots"
    weights: torch.Tensor
    copied: torch.cuda.Event | None
    probe: Measurement | None = None
    survival: torch.Tensor | None = None
    made: Blob | None = None

    def published(self, version: int) -> PublishedPolicy:
        data, digest, anchor = self.owner.make(self)
        if self.survival is not None:
            self.owner.note_survival(version, *self.survival.tolist())
        return PublishedPolicy(version, digest, data, self.probe and self.probe.probe(), anchor=anchor)

    def release(self) -> None:
        """Make no patch of it. One that is made has been released."""
        self.owner.drop(self)


class WeightSnapshots:
    """The maker of snapshots of `model`, whose parameters that train without an adapter are now as they were loaded.

    `take` belongs to the thread that trains; any thread may call the rest.
    """

    def __init__(self, model: Any) -> None:
        self._weights = list(published_weights(model))
        self._places: dict[str, Place] = {}
        self._length = 0
        for weight in self._weights:
            size = weight.shape.numel()
            self._places[weight.name] = Place(self._length, size)
            self._length += -(-size // PER_WORD) * PER_WORD
        self._is_pinned = torch.cuda.is_available()
        self._model = model
        self._free: deque[torch.Tensor] = deque()
        self._num_taken = 0
        self._has_warned = False
        self._making = threading.Lock()
        self._unmade: deque[WeightSnapshot] = deque()
        loaded = self._new_buffer()
        with torch.no_grad():
            for weight in self._weights:
                self._part(loaded, weight).copy_(weight.base(), non_blocking=True)
        if self._on_gpu:
            torch.cuda.synchronize()
        shapes = {weight.name: weight.shape for weight in self._weights}
        self._maker = PatchMaker(shapes, self._places, loaded, self._free.append)

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
        probe, copied = probe and probe.on_way_to_host(), None
        if self._on_gpu:
            copied = torch.cuda.Event()
            copied.record()
        snapshot = WeightSnapshot(self, buffer, copied, probe, survival)
        self._unmade.append(snapshot)  # without the lock, which the publisher holds while it makes a patch
        return snapshot

    def make(self, snapshot: WeightSnapshot) -> Blob:
        """Return the patch of a snapshot. Those that were taken before it are made before it."""
        with self._making:
            while snapshot.made is None:
                self._make_next()
            return snapshot.made

    def drop(self, snapshot: WeightSnapshot) -> None:
        with self._making:
            if snapshot in self._unmade:
                self._unmade.remove(snapshot)
                self._free.append(snapshot.weights)

    def patch(self, weights: torch.Tensor) -> WeightPatch:
        """Return the patch that makes `weights` of the loaded ones."""
        return self._maker.patch(weights)

    def save(self, folder: Path) -> None:
        """Write to a checkpoint what the patches to come depend on: on all snapshots that were taken, which are made first."""
        with self._making:
            while self._unmade:
                self._make_next()
            self._maker.save(folder)

    def restore(self, folder: Path) -> None:
        """Go on as `save` has left it. Raises ConfigError if the file is not of this model."""
        self._maker.restore(folder, self._new_buffer)

    def _make_next(self) -> None:
        snapshot = self._unmade.popleft()
        if snapshot.copied is not None:
            snapshot.copied.synchronize()
        snapshot.made = self._maker.blob(snapshot.weights)

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
            for weight in self._weights:
                values = weight.now()
                self._part(buffer, weight).copy_(values, non_blocking=True)
                if weight.merged:
                    sums.append(_survival(values, weight.base(), self._num_taken))
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
