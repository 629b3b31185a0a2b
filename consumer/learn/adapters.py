"""A PEFT adapter on disk, as `save_pretrained`, `slipstream sft` and every checkpoint write it, and as a run may start from it.

Guarantee: an adapter that was read is a LoRA in safetensors, finite, and changes the model that it is put on. It becomes the
policy tensor for tensor. Otherwise the run does not start, and the message names the setting, module or tensor that disagrees
with the `lora` section.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load

from consumer.learn.checkpoints import CONFIG_FILE
from protocol.config.lora_section import LORA_REFUSED
from protocol.errors import ConfigError
from protocol.library_errors import reading
from protocol.wire.hub import snapshot
from protocol.wire.model_check import adapter_problems
from protocol.wire.model_source import checked

TENSORS_FILE = "adapter_model.safetensors"
_PART = re.compile(r"(?P<module>.*)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?$")
_AGREE = ("r", "lora_alpha", "use_rslora", "fan_in_fan_out", "use_dora", "rank_pattern", "alpha_pattern")
_BASE_STAYS = (
    "gaussian",
    "orthogonal",
    "eva",
    "mica",
)  # values of init_lora_weights; with others PEFT changes the base


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter that was read.

    Args:
        key: of the configuration, by which the user named the folder.
        settings: of adapter_config.json.
        tensors: by PEFT's names, as saved, on the CPU.
        digest: sha256 of the tensors' file in hex.
    """

    path: Path
    key: str
    settings: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    digest: str

    @classmethod
    def read(cls, path: Path, key: str) -> Self:
        """Read the adapter in a folder.

        Raises:
            ConfigError: there is no adapter that can be used.
        """
        checked(path, adapter_problems(path), key)
        with reading(f"{key}: {path}"):
            settings = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
            data = (path / TENSORS_FILE).read_bytes()
            tensors = load(data)
        kind = settings.get("peft_type")
        if kind != "LORA":
            raise ConfigError(f"{key}: {path}/{CONFIG_FILE} is of an adapter of type {kind}, expected LORA")
        _refuse_unusable(tensors, f"{key}: {path}")
        return cls(path, key, settings, tensors, hashlib.sha256(data).hexdigest())

    def load_into(self, model: PeftModel) -> None:
        """Make it the adapter `default` of `model`, tensor for tensor.

        Raises:
            ConfigError: a tensor is missing, extra or of another shape.
        """
        expected = get_peft_model_state_dict(model, adapter_name="default")
        missing, extra = expected.keys() - self.tensors.keys(), self.tensors.keys() - expected.keys()
        if missing or extra:
            differences = [_some(names, what) for names, what in ((missing, "missing"), (extra, "left over")) if names]
            raise self._refusal(
                f"{' and '.join(differences)}. Its target_modules are "
                f"{_shown(self.settings.get('target_modules'))}; set lora.target_modules to them, and model.path to "
                "the model that it was trained on"
            )
        for name, tensor in self.tensors.items():
            if tensor.shape != expected[name].shape:
                raise self._refusal(
                    f"{name} has shape {list(tensor.shape)}, expected {list(expected[name].shape)}. It is of another model"
                )
        set_peft_model_state_dict(model, self.tensors, adapter_name="default")
        loaded = get_peft_model_state_dict(model, adapter_name="default")
        for name, tensor in self.tensors.items():
            if not torch.equal(loaded[name].cpu(), tensor.to(loaded[name].dtype)):
                raise self._refusal(f"PEFT did not load {name}")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{self.key}: {self.path} does not fit model.path and lora: {why}")


def initial_adapter(place: str, lora: LoraConfig) -> AdapterFolder:
    """Read the adapter that a run starts from (`lora.init_from`): a folder or a hub name.

    Raises:
        ConfigError: there is none, or its settings are not those of `lora`.
    """
    key = "lora.init_from"
    found = AdapterFolder.read(_resolve(place, key), key)
    for name in _AGREE:
        theirs, ours = found.settings.get(name, getattr(LoraConfig(), name)), getattr(lora, name)
        if (theirs or None) != (ours or None):
            raise ConfigError(
                f"{key}: {place} has {name}={theirs}, the lora section {name}={ours}; set lora.{name}={theirs}"
            )
    for name, allowed in LORA_REFUSED.items():
        value = found.settings.get(name)
        if value is not None and value not in allowed:
            raise ConfigError(f"{key}: {place} has {name}={value}, which vLLM cannot serve")
    init = found.settings.get("init_lora_weights")
    if isinstance(init, str) and init not in _BASE_STAYS:
        raise ConfigError(
            f"{key}: {place} was made with init_lora_weights={init}, so it is of a base from which PEFT took a part; convert it "
            "(PEFT's path_initial_model_for_weight_conversion), or export the merged model and start from that"
        )
    return found


def _resolve(place: str, key: str) -> Path:
    folder = Path(place)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or place.startswith((".", "~")) or place.count("/") != 1:
        raise ConfigError(f"{key}: there is no folder {place} (searched from {Path.cwd()})")
    return snapshot(place, None, (CONFIG_FILE, TENSORS_FILE), key)


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


def _some(names: set[str], what: str) -> str:
    return f"{len(names)} tensors are {what}, such as {min(names)}"


def _shown(modules: Any) -> str:
    return ", ".join(sorted({m.rpartition(".")[2] for m in modules})) if isinstance(modules, list) else str(modules)
