"""The adapter that a run starts from: `lora.init_from`.

Guarantee: it becomes the policy tensor for tensor, or the run does not start and the message says which setting, module or
tensor of it does not agree with the `lora` section.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

from consumer.checkpoints.adapter_folder import TENSORS_FILE, AdapterFolder
from consumer.checkpoints.folders import CONFIG_FILE
from protocol.config.library_section import LORA_UNSERVABLE
from protocol.errors import ConfigError

_KEY = "lora.init_from"
_AGREE = ("r", "lora_alpha", "use_rslora", "fan_in_fan_out")
_FREE = ("init_lora_weights",)  # of how it was made, not of what it is


class InitialAdapter(AdapterFolder):
    """See the module's guarantee."""

    @classmethod
    def open(cls, place: str, lora: LoraConfig) -> "InitialAdapter":
        """The adapter in a folder or of a hub name. Raises ConfigError if there is none, or its settings are not those of
        `lora`."""
        found = cls.read(_resolve(place), _KEY)
        for key in _AGREE:
            theirs, ours = found.settings.get(key, getattr(LoraConfig(), key)), getattr(lora, key)
            if theirs != ours:
                raise ConfigError(
                    f"{_KEY}: {place} has {key}={theirs}, the lora section {key}={ours}; set lora.{key}={theirs}"
                )
        for key, allowed in LORA_UNSERVABLE.items():
            value = found.settings.get(key)
            if key not in _FREE and value is not None and value not in allowed:
                raise ConfigError(f"{_KEY}: {place} has {key}={value}, which vLLM cannot serve")
        return found

    def load_into(self, model: PeftModel) -> None:
        """Makes it the adapter `default` of `model`. Raises ConfigError if a tensor is missing, extra or of another shape."""
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

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(f"{_KEY}: {self.path} does not fit model.path and lora: {what}")


def _resolve(place: str) -> Path:
    folder = Path(place)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or place.startswith((".", "~")) or place.count("/") != 1:
        raise ConfigError(f"{_KEY}: there is no folder {place} (looked from {Path.cwd()})")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(place, allow_patterns=[CONFIG_FILE, TENSORS_FILE]))
    except Exception as error:
        raise ConfigError(
            f"{_KEY}: {place} is neither a folder nor a hub adapter that could be fetched: {error}"
        ) from error


def _some(names: set[str], what: str) -> str:
    return f"{len(names)} tensors are {what}, such as {min(names)}"


def _shown(modules: Any) -> str:
    return ", ".join(sorted({m.rpartition(".")[2] for m in modules})) if isinstance(modules, list) else str(modules)
