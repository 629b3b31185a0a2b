"""Stand-ins for vLLM's LoRA layers and the manager that has them, and adapters in files."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

QKV, DOWN = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"
Q, K, V = (f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv")


class Wrapped(torch.nn.Module):
    """A layer with two slots of rank 2 for each of its slices."""

    tp_rank = 0

    def __init__(self, outputs: tuple[int, ...], inputs: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base_layer: Any = torch.nn.Module()
        self.output_sizes = list(outputs)
        self.lora_a_stacked = tuple(torch.zeros(2, 1, 2, inputs, dtype=dtype) for _ in outputs)
        self.lora_b_stacked = tuple(torch.zeros(2, 1, size, 2, dtype=dtype) for size in outputs)

    def put(self, number: int, down: list[list[float]], up: list[list[float]], slot: int = 1) -> None:
        """Put A (2, inputs) and B (outputs, 2) of slice `number` into a slot."""
        self.lora_a_stacked[number][slot, 0] = torch.tensor(down)
        self.lora_b_stacked[number][slot, 0] = torch.tensor(up)


def model_of(layers: dict[str, torch.nn.Module]) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, layer in layers.items():
        parent, *path = model, *name.split(".")
        for step in path[:-1]:
            if not hasattr(parent, step):
                parent.add_module(step, torch.nn.Module())
            parent = getattr(parent, step)
        parent.add_module(path[-1], layer)
    return model


def manager_of(layers: dict[str, Any], **others: torch.nn.Module) -> Any:
    """Stands for vLLM's `LoRAModelManager` whose slot 1 has the adapter of id 7."""
    return SimpleNamespace(
        model=model_of(layers | {name.replace("__", "."): each for name, each in others.items()}),
        modules=layers,
        packed_modules={QKV: [Q, K, V]} if QKV in layers else {},
        lora_index_to_id=[None, 7],
        punica_wrapper_mapping={},
    )


def write_adapter(
    folder: Path,
    pairs: dict[str, tuple[Any, Any]],
    change: Callable[[dict[str, Any]], None] = lambda tensors: None,
    **config: Any,
) -> Path:
    """Write A and B of modules as PEFT does. `lora_alpha` is 2 unless it is given."""
    folder.mkdir()
    tensors = {}
    for module, (down, up) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.as_tensor(down)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.as_tensor(up)
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2} | config))
    return folder
