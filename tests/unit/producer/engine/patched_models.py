"""A stand-in for a model of vLLM whose weights can be patched, and its checkpoint."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

State = dict[str, torch.Tensor]


def checkpoint(**changes: torch.Tensor) -> State:
    """Four tensors of small numbers, which bfloat16 holds."""
    return {
        "embed.weight": torch.arange(1.0, 7).view(3, 2),
        "q.weight": torch.tensor([[1.0, 2.0]]),
        "k.weight": torch.tensor([[3.0, 4.0], [5.0, 6.0]]),
        "o.weight": torch.arange(1.0, 9).view(2, 4),
        "norm.weight": torch.ones(2),
    } | {name.replace("_", "."): tensor for name, tensor in changes.items()}


def write(folder: Path, state: State, dtype: torch.dtype = torch.bfloat16) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.to(dtype) for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


class Packing:
    """Computes as vLLM's CPU build does, with a copy of the weight in another order."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.data.t().clone()
        layer.cpu_linear = lambda x: x @ packed

    def apply(self, layer: Any, x: torch.Tensor, bias: None) -> torch.Tensor:
        return layer.cpu_linear(x)  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    """One of two workers: its layers have all of `embed` with a row of padding, q and k in one parameter, and half of the columns
    of `o`. The head is the embeddings."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        for name, shape in {"embed": (4, 2), "qk": (3, 2), "o": (2, 2), "norm": (2,)}.items():
            layer: Any = torch.nn.Module()
            layer.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
            self.add_module(name, layer)
        self.head: Any = torch.nn.Module()
        self.head.weight = self.embed.weight
        self.loads: dict[str, Callable[[torch.Tensor], Any]] = {
            "embed.weight": lambda whole: self._at("embed", 0, 3).copy_(whole),
            "q.weight": lambda whole: self._at("qk", 0, 1).copy_(whole),
            "k.weight": lambda whole: self._at("qk", 1, 2).copy_(whole),
            "o.weight": lambda whole: self._at("o", 0, 2).copy_(whole.narrow(1, 2 * self.rank, 2)),
            "norm.weight": lambda whole: self._at("norm", 0, 2).copy_(whole),
        }

    def _at(self, layer: str, start: int, rows: int) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, layer).weight.data
        return weight.narrow(0, start, rows)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, whole in tensors:
            if name in self.loads:
                self.loads[name](whole)

    def packed(self) -> "Model":
        for layer in (self.head, self.qk, self.o):
            layer.quant_method = Packing()
            layer.quant_method.process_weights_after_loading(layer)
        return self


def loaded(state: State, rank: int = 0) -> Model:
    model = Model(rank)
    model.load_weights(state.items())
    return model


def values(model: Model) -> dict[str, list[Any]]:
    return {name: parameter.tolist() for name, parameter in model.named_parameters()}
