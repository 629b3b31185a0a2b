"""The frozen base, spread over the ranks layer by layer (FSDP2, https://arxiv.org/abs/2304.11277).

Guarantee: between two passes each rank holds its part of every decoder layer and no more of it; a pass sees whole layers, with
the very numbers of the model files. What is trained, embeddings and LM head are whole on every rank.

A pass through a sharded model gathers each layer from all ranks, so all of them make as many passes, forward and backward, in the
same order. Whatever asks the model for something has to see to that.
"""

import logging
from collections import Counter
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

from consumer.ranks.exchange import Ranks
from protocol.config.learning import ShardBase
from protocol.errors import ConfigError
from protocol.wire.model_folder import ARCHITECTURES

logger = logging.getLogger(__name__)

_LARGEST_SHARE = 0.6  # of a device that a whole base may take: activations, gradients and optimizer want the rest


def text_model(model: Any) -> Any:
    """What makes the hidden states of text in a causal language model, or in a vision-language model."""
    return model.get_decoder() if type(model).__name__ in ARCHITECTURES else model.base_model


def is_sharded(model: Any) -> bool:
    """Whether this causal language model, which may have LoRA layers, was given to `shard_base`."""
    return isinstance(text_model(model), FSDPModule)


def shard_base(choice: ShardBase, model: Any, ranks: Ranks, device: torch.device) -> None:
    """Spreads the layers over the ranks where that is asked for, or where the base is too large to be whole on each. What it
    spreads is on the device afterwards; the rest is where it was. Is called by all ranks.

    Args:
        model: causal language model with LoRA layers; only those are trained.
        device: on which this rank computes.

    Raises:
        ConfigError: this model cannot be sharded.
    """
    if ranks.world == 1 or choice == "none":
        return
    if choice == "auto" and not _is_too_large(model, ranks, device):
        return
    layers = [
        module for module in text_model(model).modules() if type(module).__name__ in (model._no_split_modules or ())
    ]
    if not layers:
        raise _refusal(f"{type(model).__name__} does not say which of its modules are decoder layers")
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    mesh = ranks.mesh
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=trained | _of_other_types(layer))
    # What lies around the layers stays whole. As the root of all of them it lets one layer be gathered while another computes.
    fully_shard(text_model(model), mesh=mesh, ignored_params=set(model.parameters()))
    if ranks.rank == 0:
        logger.info("the base lies on %d ranks: each keeps a part of its %d layers", ranks.world, len(layers))


def _is_too_large(model: Any, ranks: Ranks, device: torch.device) -> bool:
    base_bytes: int = sum(
        tensor.numel() * tensor.element_size() for tensor in model.parameters() if not tensor.requires_grad
    )
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = psutil.virtual_memory().total // ranks.world
    rooms = ranks.gather({"room": torch.tensor([float(room)])})["room"]
    return base_bytes > _LARGEST_SHARE * float(rooms.min())


def _of_other_types(layer: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The few frozen parameters, such as those of norms, that are of another type than most of the layer: they stay whole,
    because what is gathered together must be of one type. (bitsandbytes 0.50: a spread NF4 base computes rightly once and wrongly
    from the second pass on, one of int8 raises.)"""
    frozen = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in frozen:
        sizes[parameter.dtype] += parameter.numel()
    [(most, _)] = sizes.most_common(1)
    if not most.is_floating_point:
        raise _refusal(
            f"its layers are quantized ({most}), and weights that were spread and gathered again do not know how they were"
        )
    return {parameter for parameter in frozen if parameter.dtype != most}


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"pipeline.shard_base: {why}; set it to none, which keeps the whole base on every rank, and choose GPUs that hold it"
    )
