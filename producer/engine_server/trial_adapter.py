"""A small LoRA adapter by which a server shows that it sees the folder, takes the run's rank and applies what it loads.

Guarantee: it changes one linear layer of the base model by about as much as that layer has, equal in every process. No weights
are read, only their shapes, and torch is not imported.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import ConfigError
from protocol.wire.model_folder import is_of_text_model

_SEED = 0
_IN_EVERY_FAMILY = "_proj"


def write_trial_adapter(model_folder: Path, lora: dict[str, Any], folder: Path) -> None:
    """Writes it to `folder`, which must not exist, with rank `lora.r`. Raises ConfigError where no layer of the model fits,
    OSError where it cannot be written."""
    from safetensors.numpy import save

    name, (outputs, inputs) = _layer(model_folder, lora["target_modules"])
    rank, module = int(lora["r"]), name.removesuffix(".weight")
    random = np.random.default_rng(_SEED)
    lora_a = random.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32)
    lora_b = random.normal(0, rank**-0.5, (outputs, rank)).astype(np.float32)
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [module.rpartition(".")[2]],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    key = f"base_model.model.{module}"
    tensors = {f"{key}.lora_A.weight": lora_a, f"{key}.lora_B.weight": lora_b}
    content = save(tensors, {"format": "pt"})  # `save_file` has errors of its own
    (folder / "adapter_model.safetensors").write_bytes(content)


def _layer(model_folder: Path, target_modules: Any) -> tuple[str, tuple[int, int]]:
    """Name and shape (outputs, inputs) of the weights of a linear layer that the run trains. vLLM takes names of files, too."""
    from safetensors import safe_open

    for file in sorted(model_folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as weights:
            for name in sorted(weights.keys()):
                shape = weights.get_slice(name).get_shape()
                if len(shape) == 2 and name.endswith(".weight") and _is_trained(name, target_modules):
                    return name, (shape[0], shape[1])
    raise ConfigError(
        f"model.path: no file of weights (*.safetensors) in {model_folder} has a linear layer that lora.target_modules "
        f"({target_modules}) names, so it cannot be seen whether the server applies adapters"
    )


def _is_trained(name: str, target_modules: Any) -> bool:
    module = name.removesuffix(".weight").rpartition(".")[2]
    if not is_of_text_model(name):
        return False
    if isinstance(target_modules, Iterable) and not isinstance(target_modules, str):
        return module in target_modules
    return module.endswith(_IN_EVERY_FAMILY) and ".experts." not in name
