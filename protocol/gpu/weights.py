"""The weights of a model's folder: names, shapes and bits, from the headers of its safetensors.

Guarantee: no weight is read and no library of models is imported, so it takes milliseconds for any model.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError
from protocol.wire.model_check import is_of_text_model, read_header

_LAYER = re.compile(r"\.(\d+)\.")  # of the name of a weight: the number of its layer


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
        """Return whether it is the matrix of a linear layer in a decoder layer: neither embeddings nor LM head."""
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
        return [folder / name for name in sorted(set(json_of(index).get("weight_map", {}).values()))]
    return sorted(folder.glob("*.safetensors"))


def _header(file: Path) -> dict[str, Any]:
    try:
        return read_header(file)
    except OSError as error:
        raise refusal(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise refusal(f"{file} {error}") from error


def json_of(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def refusal(why: str) -> ConfigError:
    return ConfigError(
        f"model.path: {why}, so the parts of trainer and engine of the GPU that they share cannot be computed; set pipeline.gpu: "
        "own, and engine.gpu_memory_utilization to what the trainer leaves"
    )
