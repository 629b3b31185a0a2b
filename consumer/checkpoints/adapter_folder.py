"""A PEFT adapter on disk, as `save_pretrained`, `slipstream sft` and every checkpoint write it.

Guarantee: an adapter that was read is a LoRA in safetensors, finite, and changes the model that it is put on.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from consumer.checkpoints.folders import CONFIG_FILE
from protocol.errors import ConfigError

TENSORS_FILE = "adapter_model.safetensors"
_PART = re.compile(r"(?P<module>.*)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?$")


@dataclass(frozen=True)
class AdapterFolder:
    """See the module's guarantee."""

    path: Path
    settings: dict[str, Any]  # of adapter_config.json
    tensors: dict[str, torch.Tensor]  # by PEFT's names, as saved, on the CPU
    digest: str  # sha256 of the tensors' file in hex

    @classmethod
    def read(cls, path: Path, key: str) -> Self:
        """Raises ConfigError if there is no adapter that can be used; `key` is how the user named the folder."""
        for name in (CONFIG_FILE, TENSORS_FILE):
            if not (path / name).is_file():
                has_old_form = (path / "adapter_model.bin").is_file()
                old = " (adapter_model.bin is not read: save it as safetensors)" if has_old_form else ""
                raise ConfigError(f"{key}: {path} has no {name}, so it is not an adapter of PEFT{old}")
        try:
            settings = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
            data = (path / TENSORS_FILE).read_bytes()
            tensors = load(data)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error}") from error
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        if kind != "LORA":
            raise ConfigError(f"{key}: {path}/{CONFIG_FILE} is of an adapter of type {kind}, expected LORA")
        _refuse_unusable(tensors, f"{key}: {path}")
        return cls(path, settings, tensors, hashlib.sha256(data).hexdigest())


def _refuse_unusable(tensors: dict[str, torch.Tensor], where: str) -> None:
    acting: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"{where}: {name} has values that are not finite")
        found = _PART.match(name)
        if found and bool(tensor.any()):
            acting.setdefault(found["module"], set()).add(found["part"])
    if {"A", "B"} not in acting.values():
        raise ConfigError(
            f"{where}: it changes nothing, because in every module one of the two matrices is zero; it was never trained"
        )
