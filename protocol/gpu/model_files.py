"""The size of a model, read from its folder: from `config.json` and the headers of its safetensors.

Guarantee: no weight is read and no library of models is imported, so it takes milliseconds for any model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.gpu.cache_layers import CacheLayer, cache_layers
from protocol.gpu.weights import Weight, json_of, refusal, weights_of

_BY_NAME = {
    "vocabulary_size": "embed_tokens",
    "query_size": ".q_proj",
    "kv_size": ".k_proj",
    "intermediate_size": ".up_proj",
}
"""Ends of the names of matrices whose first side is this size."""


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder."""

    weights: tuple[Weight, ...]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    query_size: int  # of all heads
    kv_size: int  # of all key-value heads
    vocab_size: int
    max_length: int | None  # longest context in tokens, where the files say it
    cache: tuple[CacheLayer, ...] | None = None  # the layers that keep tokens; None: all, keys and values of `kv_size`

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return (CacheLayer(2 * self.kv_size),) * self.num_layers if self.cache is None else self.cache


def model_shape(folder: Path) -> ModelShape:
    """Read the shape of the model in this folder; of a vision-language checkpoint, of its text model.

    Raises:
        ConfigError: the folder's files do not say it.
    """
    config, weights = json_of(folder / "config.json"), tuple(weights_of(folder))
    if not weights:
        raise refusal(f"{folder} has no *.safetensors, whose headers say the shapes of the weights")
    config = config.get("text_config") or config
    by_shape = _from_weights(weights)

    def size(name: str, *keys: str) -> int:
        for value in (*map(config.get, keys), by_shape.get(name)):
            if isinstance(value, int) and value > 0:
                return value
        raise refusal(f"neither {folder}/config.json nor the names of its weights say the {name.replace('_', ' ')}")

    hidden = size("hidden_size", "hidden_size", "n_embd", "d_model")
    heads = config.get("num_attention_heads") or config.get("n_head") or 0
    of_head = config.get("head_dim") or (hidden // heads if heads else 0)
    kv_size = by_shape.get("kv_size") or _kv_heads(config, heads) * of_head or hidden
    num_layers = size("number_of_layers", "num_hidden_layers", "n_layer")
    limits = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    return ModelShape(
        weights=weights,
        hidden_size=hidden,
        intermediate_size=by_shape.get("intermediate_size") or config.get("intermediate_size") or 4 * hidden,
        num_layers=num_layers,
        query_size=by_shape.get("query_size") or heads * of_head or hidden,
        kv_size=kv_size,
        vocab_size=size("vocabulary_size", "vocab_size"),
        max_length=next((limit for limit in limits if isinstance(limit, int) and limit > 0), None),
        cache=cache_layers(config, weights, num_layers, kv_size),
    )


def _kv_heads(config: dict[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    keys = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
    return next((found for key in keys if isinstance(found := config.get(key), int) and found > 0), heads)


def _from_weights(weights: Iterable[Weight]) -> dict[str, int]:
    """Derive sizes from the shapes of the weights, by the names that most decoders give them. A configuration leaves out what
    is a default of its architecture."""
    found: dict[str, int] = {}
    for weight in weights:
        if weight.is_of_layer:
            found["number_of_layers"] = max(found.get("number_of_layers", 0), weight.layer + 1)
        for name, end in _BY_NAME.items():
            if len(weight.shape) == 2 and weight.module.endswith(end):
                found[name] = weight.shape[0]
                if name == "vocabulary_size":
                    found["hidden_size"] = weight.shape[1]
    return found
