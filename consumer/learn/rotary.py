"""Rotary positions whose frequencies depend on length: they are the engine's, for every pass.

Guarantee: behind `follow_engine` a row's numbers depend neither on the rows beside it nor on passes before. vLLM chooses the
frequencies once, when it loads a model, and transformers anew in each pass, by its longest row:

    longrope   vLLM: the long factors if max_model_len is beyond original_max_position_embeddings, else the short ones
    dynamic    vLLM: those of max_position_embeddings
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from protocol.config.run import RunConfig
from protocol.errors import ConfigError

_BY_LENGTH = ("longrope", "dynamic")
_ANY = 2**63 - 1


def follow_engine(model: Any, config: RunConfig) -> None:
    """Give the rotary embeddings of a model that was just loaded the numbers of this run's engine."""
    for module in model.modules():
        if isinstance(getattr(module, "rope_type", None), str | dict) and hasattr(module, "config"):
            _fix(module, engine_length(config, module.config))


def engine_length(config: RunConfig, text: Any) -> int:
    """Return the `max_model_len` that the engine is to have: that of the file, or vLLM's default.

    Args:
        text: the configuration of the text model.
    """
    chosen = config.engine.get("max_model_len")
    if isinstance(chosen, int) and chosen > 0:
        return chosen
    longest = int(getattr(text, "max_position_embeddings", 0))
    for numbers in _by_length(text):
        if numbers["rope_type"] == "longrope":
            return int(getattr(text, "original_max_position_embeddings", longest))
        return int(longest * numbers.get("factor", 1))
    return longest


def engine_lengths(config: RunConfig, text: Any) -> tuple[int, int] | None:
    """Return the least and the largest `max_model_len` of an engine that computes as this trainer; None: all do.

    Raises:
        ConfigError: no engine of the length that the file says computes this model.
    """
    least, most = 0, _ANY
    for numbers in _by_length(text):
        if numbers["rope_type"] == "dynamic":
            most = min(most, int(text.max_position_embeddings))
        elif engine_length(config, text) > (original := int(numbers["original_max_position_embeddings"])):
            least = max(least, original + 1)
        else:
            most = min(most, original)
    if not least <= engine_length(config, text) <= most:
        raise ConfigError(
            f"engine.max_model_len: the model's positions are scaled by rope_type=dynamic, for which vLLM computes no more than "
            f"its max_position_embeddings; set it to {most} or less"
        )
    return (least, most) if (least, most) != (0, _ANY) else None


def _by_length(text: Any) -> Iterator[dict[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    for numbers in (parameters, *(parameter for parameter in parameters.values() if isinstance(parameter, dict))):
        if numbers.get("rope_type") in _BY_LENGTH:
            yield numbers


def _fix(module: Any, length: int) -> None:
    """Let this embedding compute no numbers in a pass, and have the same for all lengths where its class chooses some itself.
    Its configuration becomes a copy of its own."""
    types = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    for layer_type, rope_type in types.items():
        if rope_type not in _BY_LENGTH:
            continue
        module.config = copy.deepcopy(module.config)
        prefix = "" if layer_type is None else f"{layer_type}_"
        parameters = module.config.rope_parameters
        numbers = parameters if layer_type is None else parameters[layer_type]
        before = getattr(module, f"{prefix}inv_freq")
        longest = int(module.config.max_position_embeddings)
        numbers |= (
            _of_longrope(numbers, longest, length)
            if rope_type == "longrope"
            else _of_dynamic(numbers, longest, 2 * len(before))
        )
        options = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, before.device, **options)
        for name in ("inv_freq", "original_inv_freq"):
            module.register_buffer(f"{prefix}{name}", frequencies.clone(), persistent=False)
        setattr(module, f"{prefix}attention_scaling", scaling)
        if layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type = module.rope_type | {layer_type: "default"}


def _of_longrope(numbers: dict[str, Any], longest: int, length: int) -> dict[str, Any]:
    original = int(numbers["original_max_position_embeddings"])
    kind = "long" if length > original else "short"
    scale = longest / original
    scaling = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    scaling = numbers.get(f"{kind}_mscale") or scaling
    factors = numbers[f"{kind}_factor"]
    return {
        "short_factor": factors, "long_factor": factors, "attention_factor": scaling,
        "short_mscale": scaling, "long_mscale": scaling,
    }  # fmt: skip


def _of_dynamic(numbers: dict[str, Any], longest: int, size: int) -> dict[str, Any]:
    trained = numbers.get("max_trained_positions", longest)
    stretch = numbers.get("alpha") or numbers["factor"] * longest / trained - (numbers["factor"] - 1)
    theta = numbers["rope_theta"] * stretch ** (size / (size - 2))
    return {"rope_theta": theta}
