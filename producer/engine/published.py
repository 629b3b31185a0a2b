"""A published adapter as this worker of vLLM has to hold it, found without vLLM's code for adapters.

Guarantee: the files are those that were verified, by their CRC-32. Names, ranks and scaling are PEFT's. Of a matrix a worker
takes the part that the layer's own loader of base weights takes.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from protocol.wire.adapter_blob import CONFIG, TENSORS, checksum_of

_SHOWN = 3  # modules of an error
_PREFIX = "base_model.model."
_MATRICES = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    ".lora_embedding_A": "lora_A",
    ".lora_embedding_B": "lora_B",
}
_OF_THE_BASE = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
"""Weights that PEFT saves beside an adapter of embeddings. They have not changed."""


class PartlyServedError(Exception):
    """A part of this policy would not be served, which would be another one."""


def listed(names: Iterable[str]) -> str:
    """Return the first of these names of modules, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{', '.join(ordered[:_SHOWN])}{more}"


class Pair(NamedTuple):
    """The matrices of a module, A (rank, inputs) and B (outputs, rank), in the dtype of the file. The update of its weight is
    scaling * B @ A."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class Part:
    """A target module of an adapter, by the last part of its name, in the engine: a whole layer, or the shard of a fused one."""

    name: str
    layer: str
    shard: str | int | None
    down: torch.Tensor
    up: torch.Tensor
    scaling: float


class PublishedAdapter(NamedTuple):
    """The pairs by the module's name in the checkpoint, and PEFT's configuration."""

    pairs: dict[str, Pair]
    config: dict[str, Any]

    def targets(self, kind: str) -> bool:
        """Return whether modules whose name ends in `kind` must be in the adapter. False where PEFT chooses by more than that."""
        targets = self.config.get("target_modules")
        chooses = ("target_parameters", "exclude_modules", "layers_to_transform")
        return isinstance(targets, list) and kind in targets and not any(self.config.get(key) for key in chooses)


def read_published(folder: Path, checksum: int | None) -> PublishedAdapter:
    """Read the adapter in `folder`; its tensors stay in the file until they are used. Raises PartlyServedError if the files do
    not have this checksum (None: any), or hold anything but pairs of matrices."""
    if checksum is not None and (found := checksum_of(folder)) != checksum:
        raise PartlyServedError(
            f"the files in {folder} are not those that were verified: CRC-32 {found}, not {checksum}"
        )
    keys: dict[str, dict[str, str]] = {}  # by module and matrix
    others = []
    with safe_open(folder / TENSORS, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            if ending := next((ending for ending in _MATRICES if key.endswith(ending)), ""):
                keys.setdefault(key.removesuffix(ending).removeprefix(_PREFIX), {})[_MATRICES[ending]] = key
            elif not key.endswith(_OF_THE_BASE):
                others.append(key)
        others += [key for matrices in keys.values() if len(matrices) == 1 for key in matrices.values()]
        if others:
            raise PartlyServedError(f"{', '.join(sorted(others)[:3])}: not a pair of LoRA matrices of a linear layer")
        if not keys:
            raise PartlyServedError("the adapter is empty")
        config = json.loads((folder / CONFIG).read_text())
        pairs = {}
        for module, matrices in keys.items():
            down, up = (file.get_tensor(matrices[name]) for name in ("lora_A", "lora_B"))
            pairs[module] = Pair(down, up, scaling(config, module, up.shape[1]))
    return PublishedAdapter(pairs, config)


def scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """Return the factor by which PEFT multiplies B @ A of this module."""
    alpha: float = next(
        (
            value
            for pattern, value in (config.get("alpha_pattern") or {}).items()
            if re.fullmatch(rf"(.*\.)?({pattern})", module)
        ),
        config["lora_alpha"],
    )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def loaded(
    layer: Any, shape: tuple[int, int], tensor: torch.Tensor, shard: tuple[str | int, ...], **dims: int
) -> torch.Tensor:
    """Return the part of `tensor` that this worker's layer takes along `output_dim` or `input_dim`, in its place; zero
    elsewhere."""
    target = torch.nn.Parameter(torch.zeros(shape, dtype=tensor.dtype), requires_grad=False)
    for name, dim in dims.items():
        setattr(target, name, dim)
    layer.weight_loader(target, tensor, *shard)
    return target.data
