"""The size of a model, read from its folder: `config.json` and from the headers of its safetensors.

Guarantee: no weight is read and no library of models is imported, so it takes milliseconds for any model.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError
from protocol.gpu.cache_layers import CacheLayer, cache_layers
from protocol.wire.model_check import is_of_text_model, read_header

_LAYER = re.compile(r"\.(\d+)\.")  # of the name of a weight: the number of its layer
_BY_NAME = {
    "vocabulary_size": "embed_tokens",
    "query_size": ".q_proj",
    "kv_size": ".k_proj",
    "intermediate_size": ".up_proj",
}
"""Ends of the names of matrices whose first side is this size."""


class Weight(NamedTuple):
    """A tensor of a model's files. `bits` are those of an element there."""

    name: str
    shape: tuple[int, ...]
    bits: int
    is_float: bool = True

    @property
    def num_elements(self) -> int:
        product = 1
        for length in self.shape:
            product *= length
        return product

    @property
    def is_linear(self) -> bool:
        """Tell whether it is the matrix of a linear layer in a decoder layer: neither embeddings nor LM head."""
        return len(self.shape) == 2 and self.name.endswith(".weight") and self.is_of_layer

    @property
    def layer(self) -> int:
        """The number of its layer; -1: of none."""
        number = _LAYER.search(self.name)
        return -1 if number is None else int(number[1])

    @property
    def is_of_layer(self) -> bool:
        return self.layer >= 0

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


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
    config, weights = _json(folder / "config.json"), tuple(weights_of(folder))
    if not weights:
        raise _refusal(f"{folder} has no *.safetensors, whose headers say the shapes of the weights")
    config = config.get("text_config") or config
    by_shape = _from_weights(weights)

    def size(name: str, *keys: str) -> int:
        for value in (*map(config.get, keys), by_shape.get(name)):
            if isinstance(value, int) and value > 0:
                return value
        raise _refusal(f"neither {folder}/config.json nor the names of its weights say the {name.replace('_', ' ')}")

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


def weights_of(folder: Path) -> Iterator[Weight]:
    """Read the headers of the safetensors that transformers loads the model from; none where its files are of another kind.

    Raises:
        ConfigError: a file cannot be read.
    """
    for file in weight_files(folder):
        for name, said in _header(file).items():
            if is_of_text_model(name):
                bits = re.search(r"\d+", said["dtype"])
                size = int(bits.group()) if bits else 8  # BOOL
                yield Weight(name, tuple(said["shape"]), size, "F" in said["dtype"] and size >= 16)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights. Some checkpoints have all weights a second time, in files with other names."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    if (index := folder / "model.safetensors.index.json").is_file():
        return [folder / name for name in sorted(set(_json(index).get("weight_map", {}).values()))]
    return sorted(folder.glob("*.safetensors"))


def _header(file: Path) -> dict[str, Any]:
    try:
        return read_header(file)
    except OSError as error:
        raise _refusal(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise _refusal(f"{file} {error}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refusal(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"model.path: {why}, so the parts of trainer and engine of the GPU that they share cannot be computed; set pipeline.gpu: "
        "own, and engine.gpu_memory_utilization to what the trainer leaves"
    )
