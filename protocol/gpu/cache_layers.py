"""The layers of a model that keep keys and values of a row in an engine, with how many numbers of how many tokens.

Guarantee: an engine keeps no less than that. What a configuration leaves open counts as little as it may be: all layers have a
window that there is, unless it says which have not. A layer that keeps a state instead of tokens counts nothing.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from protocol.gpu.weights import Weight

_ATTENDS = re.compile(
    r"\.(?:[kv]_proj|kv_a_proj_with_mqa|kv_a_proj|qkv_proj|qkv|query_key_value|c_attn|Wqkv|W_pack|att_proj)\b"
)
_TYPES = ("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list")
_ATTENTION = ("full_attention", "attention", "full", "global", "global_attention", "hybrid", "*", 1)
_WINDOWED = re.compile("sliding|local|chunked|window|compressed")
_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3": 6, "gemma3_text": 6}
"""The distance between layers without a window, where the files of a family leave it out."""


class CacheLayer(NamedTuple):
    """A layer that keeps tokens. `num_tokens` is the window; None: all tokens."""

    num_numbers: int  # of a token
    num_tokens: int | None = None


def numbers_of_row(layers: Iterable[CacheLayer], length: int) -> int:
    """Count the numbers that an engine keeps of one row of this length."""
    return sum(
        layer.num_numbers * (length if layer.num_tokens is None else min(length, layer.num_tokens)) for layer in layers
    )


def cache_layers(
    config: Mapping[str, Any], weights: Iterable[Weight], num_layers: int, kv_size: int
) -> tuple[CacheLayer, ...]:
    """Read the layers from a text model's configuration and from the names and shapes of its weights.

    Args:
        kv_size: numbers of the keys of a token, where the weights of a layer do not say it.
    """
    weights = list(weights)
    sizes = _sizes_of_layers(weights)
    latent = _number(config, "kv_lora_rank") and _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
    keeps = num_layers - _number(config, "num_kv_shared_layers")
    share = _number(config, "cla_share_factor") if config.get("use_cla") else 0
    result = []
    for index in range(num_layers):
        own = sizes.get(index, {})
        if index >= keeps or (share and index % share) or (weights and index not in sizes):
            continue
        kind = _kind(config, index)
        if kind == "none":
            continue
        numbers = own.get("k_proj", kv_size) + own.get("v_proj", 0 if "k_proj" in own else kv_size)
        result.append(CacheLayer(latent or numbers, None if kind == "full" else _window(config, kind)))
    return tuple(result)


def _sizes_of_layers(weights: Iterable[Weight]) -> dict[int, dict[str, int]]:
    """Return the layers that have weights of attention, with the sides of those of keys and values."""
    result: dict[int, dict[str, int]] = {}
    for weight in weights:
        if not weight.is_of_layer or not _ATTENDS.search(weight.name):
            continue
        sizes = result.setdefault(weight.layer, {})
        if weight.is_linear and weight.is_float and weight.module.endswith(("k_proj", "v_proj")):
            sizes[weight.module[-6:]] = weight.shape[0]
    return result


def _kind(config: Mapping[str, Any], index: int) -> str:
    """Return `full`, `none`, `chunked`, or `window`."""
    types = next((found for key in _TYPES if isinstance(found := config.get(key), list | str) and found), None)
    if types is not None:
        own = types[index % len(types)]
        if isinstance(own, str) and _WINDOWED.search(own):
            return "chunked" if "chunked" in own else "window"
        return "full" if own in _ATTENTION else "none"
    if not _attends(config, index):
        return "none"
    if _number(config, "attention_chunk_size"):
        without = config.get("no_rope_layers")
        if isinstance(without, list) and index < len(without):
            return "chunked" if without[index] else "full"
        return "chunked"
    return "window" if _window(config, "window") and _is_windowed(config, index) else "full"


def _attends(config: Mapping[str, Any], index: int) -> bool:
    """Return whether a layer of a model whose layers differ keeps tokens."""
    linear = config.get("linear_attn_config")
    for listed in (config.get("full_attn_idxs"), config.get("attn_layer_indices")):
        if isinstance(listed, list):
            return index in listed
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        return index + 1 in linear["full_attn_layers"]  # counted from 1
    if interval := _number(config, "full_attention_interval"):
        return (index + 1) % interval == 0
    if period := _number(config, "attn_layer_period"):
        return index % period == _number(config, "attn_layer_offset")
    return True


def _is_windowed(config: Mapping[str, Any], index: int) -> bool:
    if config.get("use_sliding_window") is False:
        return False
    if config.get("use_sliding_window") and "max_window_layers" in config:
        return index >= _number(config, "max_window_layers")
    patterns = ("sliding_window_pattern", "_sliding_window_pattern")
    every = next((found for key in patterns if (found := _number(config, key))), 0)
    every = every or _EVERY.get(str(config.get("model_type")), 0)
    return not every or (index + 1) % every != 0


def _window(config: Mapping[str, Any], kind: str) -> int:
    """Return the tokens of a window; 0 where it is unknown."""
    keys = (
        ("attention_chunk_size",) if kind == "chunked" else ("sliding_window", "window_size", "attention_window_size")
    )
    return next((found for key in keys if (found := _number(config, key))), 0)


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0
