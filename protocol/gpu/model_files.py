"""What a model's folder says of its size, read from `config.json` and from the headers of its safetensors.

Guarantee: no weight is read and no library of models is imported, so it takes milliseconds for any model.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError

_LONGEST_HEADER = 100 * 2**20  # bytes, as safetensors itself has it
_LENGTH = struct.Struct("<Q")
_IN_LAYER = re.compile(r"\.\d+\.")  # of the name of a weight: the number of its layer


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
        """Whether it is the matrix of a linear layer in a decoder layer: neither embeddings nor LM head."""
        return len(self.shape) == 2 and self.name.endswith(".weight") and bool(_IN_LAYER.search(self.name))

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class ModelShape:
    """Of a decoder. `max_length` is the longest context in tokens."""

    weights: tuple[Weight, ...]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_length: int


_KEYS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
    "max_length": ("max_position_embeddings", "n_positions", "max_sequence_length"),
}
"""Names in `config.json`, by ours. All of them are needed."""


def model_shape(folder: Path) -> ModelShape:
    """
    Raises:
        ConfigError: the folder's files do not say it.
    """
    config = _json(folder / "config.json")
    config = config.get("text_config") or config
    said = {name: _whole(config, keys, folder) for name, keys in _KEYS.items()}
    hidden, heads = said["hidden_size"], said["num_heads"]
    return ModelShape(
        weights=tuple(_weights(folder)),
        intermediate_size=int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden),
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        **said,
    )


def _whole(config: dict[str, Any], keys: tuple[str, ...], folder: Path) -> int:
    for key in keys:
        if isinstance(value := config.get(key), int) and value > 0:
            return value
    raise _refusal(f"{folder}/config.json has no `{keys[0]}`")


def _weights(folder: Path) -> Iterator[Weight]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _refusal(f"{folder} has no *.safetensors, whose headers say the shapes of the weights")
    for file in files:
        for name, said in _header(file).items():
            if name != "__metadata__":
                bits = re.search(r"\d+", said["dtype"])
                size = int(bits.group()) if bits else 8  # BOOL
                yield Weight(name, tuple(said["shape"]), size, "F" in said["dtype"] and size >= 16)


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            [length] = _LENGTH.unpack(stream.read(_LENGTH.size))
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise _refusal(f"{file} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise _refusal(f"{file} has no header of safetensors")
    return header


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refusal(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"model.path: {why}, so nobody can compute what trainer and engine take of the GPU that they share; set pipeline.gpu: "
        "own, and engine.gpu_memory_utilization to what the trainer leaves"
    )
