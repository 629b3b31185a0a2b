"""Gradient checkpointing by memory: the layers of a pass that compute their activations again on the way back.

Guarantee: a pass recomputes no more layers than its device has no room for. Loss and gradient are the same, bit for bit, however
many they are. The first pass with a gradient recomputes all layers but the last, and counts the bytes that the last one
keeps, whatever its kind, type and attention. Layers near the input are recomputed first: the bytes of the layers behind them are
free again by then.

Where passes of `ENOUGH_TOKENS` or more need no recomputation, passes stay as short as that takes.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from consumer.learn.memory import USED_SHARE, room_of_gpu, tokens_within
from consumer.learn.model import base_model, is_sharded, text_model
from consumer.learn.options import former_names
from consumer.ranks.exchange import Ranks
from protocol.config.learning import ENOUGH_TOKENS, FIRST_TOKENS
from protocol.gpu.memory import gib, optimizer_bytes

logger = logging.getLogger(__name__)

_LAYERS_BESIDE = 2  # the LM head, and the gradients of the layer in progress, take as much as these
_SHARE_OF_HOST = 0.5  # a CPU has no error without memory, and the producer may be on it too
_CGROUP = Path("/sys/fs/cgroup")


class RecomputedLayers:
    """Chooses them for each pass. A sharded base gathers a layer that is recomputed once more, so its ranks choose together.

    Args:
        model: with its adapter. Nothing is ever recomputed by a model without layers that transformers can checkpoint.
        options: the run's GRPOConfig.
        by_memory: False: transformers does as the options say.
    """

    def __init__(self, model: Any, options: Any, ranks: Ranks, *, by_memory: bool) -> None:
        base = base_model(model)
        self._layers: list[Any] = []
        if by_memory and base.supports_gradient_checkpointing:
            self._layers = [
                module for module in text_model(base).modules() if isinstance(module, GradientCheckpointingLayer)
            ]
        if self._layers:
            with former_names():
                base.gradient_checkpointing_enable({"use_reentrant": False})
            base.disable_input_require_grads()  # which only reentrant checkpoints need
        self._device, self._ranks, self._together = options.device, ranks, is_sharded(base)
        trained = (
            parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        num_trained = sum(each.numel() for each in trained)
        optimizer = str(getattr(options.optim, "value", options.optim))
        self._of_optimizer = num_trained * (4 + optimizer_bytes(optimizer, options.optim_args))
        self._num_recomputed = 0  # in the last pass with a gradient
        self._is_measured = self._all = False
        self._room = self._kept = self._input = 0.0  # bytes for a pass; of a layer and of its input, for each place

    @contextmanager
    def of_pass(self, places: int) -> Iterator[None]:
        """Surround a forward pass.

        Args:
            places: tokens that go through the layers, padding included.
        """
        if not self._layers or not torch.is_grad_enabled():
            yield
            return
        if not self._is_measured and not self._all:
            self._recompute(len(self._layers) - 1)
            room = self._room_now()
            with _counted(self._layers[-1]) as counted:
                yield
            growing, of_input, of_weights = counted
            self._take_over(
                room - (len(self._layers) + _LAYERS_BESIDE) * of_weights, growing / places, of_input / places
            )
            return
        if self._together:
            places = int(self._ranks.gather({"places": torch.tensor([places])})["places"].max())
        self._recompute(self._num_needed(places))
        yield

    def recompute_all(self) -> bool:
        """Recompute all layers from now on, because a device had no memory for a pass. All ranks call it.

        Returns:
            False: all ranks have done so in the last pass.
        """
        before = bool(self._layers) and self._num_recomputed < len(self._layers)
        changes = bool(self._ranks.gather({"changes": torch.tensor([before])})["changes"].any())
        self._all = True
        if changes:
            logger.warning("the device is out of memory; from now on passes recompute all layers")
        return changes

    def fitting_tokens(self) -> int | None:
        """Return the tokens that passes shall have from now on; None where there is no reason to change them."""
        if not self._is_measured or self._all:
            return None
        fitting = max(self._tokens(0), min(ENOUGH_TOKENS, self._tokens(len(self._layers))))
        return None if self._device.type == "cpu" and fitting >= FIRST_TOKENS else fitting

    def _recompute(self, number: int) -> None:
        self._num_recomputed = number
        for index, layer in enumerate(self._layers):
            layer.gradient_checkpointing = index < number

    def _bytes(self, number: int) -> float:
        """Return the bytes that a place takes in a pass that recomputes this number of layers."""
        return (len(self._layers) + _LAYERS_BESIDE - number) * self._kept + number * self._input

    def _tokens(self, number: int) -> int:
        return tokens_within(int(self._room), math.ceil(self._bytes(number)), 1)

    def _num_needed(self, places: int) -> int:
        too_much = self._bytes(0) - USED_SHARE * self._room / places
        if too_much <= 0 and not self._all:
            return 0
        saved = self._kept - self._input
        return len(self._layers) if self._all or saved <= 0 else min(len(self._layers), math.ceil(too_much / saved))

    def _room_now(self) -> float:
        if self._device.type == "cuda":
            return float(room_of_gpu(self._device)[0] - self._of_optimizer)
        return _SHARE_OF_HOST * _room_of_host() / self._ranks.world

    def _take_over(self, room: float, kept: float, of_input: float) -> None:
        """Note the measured bytes, and log how many tokens a pass may have without recomputation."""
        values = {"room": room, "kept": kept, "input": of_input}
        if self._together:
            found = self._ranks.gather({name: torch.tensor([value]) for name, value in values.items()})
            values = {name: float(each.min() if name == "room" else each.max()) for name, each in found.items()}
        self._room, self._kept, self._input = max(0.0, values["room"]), values["kept"], values["input"]
        self._is_measured = True
        if self._ranks.rank == 0:
            logger.info(
                "gradient checkpointing by memory: a token keeps %.2f MiB in %d layers and %s are free for a pass, so passes of "
                "up to %d tokens recompute nothing, and one of %d recomputes %d layers",
                self._kept * len(self._layers) / 2**20, len(self._layers), gib(self._room), self._tokens(0), FIRST_TOKENS,
                self._num_needed(FIRST_TOKENS),
            )  # fmt: skip


@contextmanager
def _counted(layer: torch.nn.Module) -> Iterator[list[int]]:
    """Count the bytes that autograd keeps of the passes inside through a layer, without its weights: [what grows with tokens, of
    its input, of copies and products of weights, which have a weight's shape]."""
    kept, found = dict[int, torch.Tensor](), list[int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        here = (
            each for each in chain(layer.parameters(), layer.buffers()) if not isinstance(each, DTensor)
        )  # where ranks share it, for a while
        weights = {each.untyped_storage().data_ptr() for each in here}
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    def end(_layer: Any, _inputs: Any, output: Any) -> None:
        hooks.__exit__(None, None, None)
        if output is not None:  # the layer raised nothing
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            of_tokens = {hidden.numel() // hidden.size(-1), hidden.size(-2)}
            matrices = [parameter.detach() for parameter in layer.parameters() if parameter.dim() > 1]
            num_bytes = {True: 0, False: 0}
            for tensor in kept.values():
                num_bytes[_is_of_weights(tensor.detach(), matrices, of_tokens)] += tensor.untyped_storage().nbytes()
            found[:] = [num_bytes[False], hidden.nbytes, num_bytes[True]]
            kept.clear()

    begun = layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
    ended = layer.register_forward_hook(end, always_call=True)
    try:
        yield found
    finally:
        begun.remove()
        ended.remove()


def _is_of_weights(tensor: torch.Tensor, matrices: list[torch.Tensor], of_tokens: set[int]) -> bool:
    """Return whether a tensor does not grow with tokens: it has the shape of a weight, or where tokens are as many as a side, its
    numbers."""
    alike = [matrix for matrix in matrices if sorted(matrix.shape) == sorted(tensor.shape)]
    if of_tokens.isdisjoint(tensor.shape):
        return bool(alike)
    here = (each for each in alike if not isinstance(each, DTensor))
    sides = (one for each in here for one in (each, each.mT) if one.shape == tensor.shape)
    return any(torch.equal(side.to(tensor.dtype), tensor) for side in sides)


def _room_of_host() -> int:
    """Return the bytes that this host, or the container around this process, can still give out."""
    room = int(psutil.virtual_memory().available)
    limit = _CGROUP / "memory.max"
    if limit.is_file() and (most := limit.read_text("ascii").strip()).isdecimal():
        used = dict(line.split() for line in (_CGROUP / "memory.stat").read_text("ascii").splitlines())
        room = min(room, int(most) - int(used["anon"]) - int(used["shmem"]))
    return room
