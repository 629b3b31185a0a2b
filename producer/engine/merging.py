"""Merging LoRA adapters into the engine's own weights, inside vLLM's worker processes (`swap.mode: merged`).

Guarantee: each set of weights is round(base + scaling * B @ A), computed in float32 from the base that was loaded, so the same
adapter gives the same bits after any number of swaps. Reading, multiplying and packing happen in a thread of low priority;
between two engine steps there is only the flip. It tells how many tokens each request had by then. An adapter of which a
part would not be served is refused. (Knows vLLM's layers only by what they have: no import.)
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from producer.engine.adapter_loading import CannotMergeError, Preparation
from producer.engine.token_counts import TokenCounts

_WEIGHTS = "adapter_model.safetensors"
_DOWN = ".lora_A.weight"
_PREFIX = "base_model.model."
_ROWS = 1024  # of the unit matrix that asks a packed layer for its weights


class MergingWorker:
    """Methods that vLLM adds to its worker (`worker_extension_cls`), called through the engine."""

    def merging_start(self) -> None:
        self._merging = Merging(self.get_model())  # type: ignore[attr-defined]
        self._token_counts = TokenCounts()
        execute_model = self.execute_model  # type: ignore[has-type]

        def counted(step: Any, *arguments: Any) -> Any:
            self._token_counts.note(step)
            return execute_model(step, *arguments)

        self.execute_model = counted

    def merging_prepare(self, path: str | None) -> None:
        """Begins to compute the weights of the PEFT adapter there, or (None) of the one before the present one."""
        self._merging.prepare(None if path is None else Path(path))

    def merging_refusal(self) -> str | None:
        """None while the weights are being prepared, "" when they are ready, otherwise why they are refused."""
        return self._merging.refusal

    def merging_flip(self) -> dict[str, int]:
        self._merging.flip()
        return self._token_counts.take()


@dataclass(frozen=True)
class Part:
    """One target module of an adapter: a whole layer of the engine, or the shard of a fused one."""

    layer: str
    shard: str | int | None
    down: torch.Tensor
    up: torch.Tensor
    scaling: float

    def delta(self) -> torch.Tensor:
        return self.scaling * (self.up.float() @ self.down.float())


class Merging(Preparation):
    """The base weights of the layers that adapters name, and the weights that come next."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._layers: dict[str, Any] = dict(model.named_modules())
        self._bases: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._former: list[Part] = []
        self._present: list[Part] = []
        self._next: list[Part] = []
        self._installs: list[Callable[[], None]] = []

    def prepare(self, folder: Path | None) -> None:
        if folder is None:
            self.begin(lambda: self._compute(self._former))
            return
        self._installs = []
        try:
            with safe_open(folder / _WEIGHTS, "pt") as tensors:
                modules = [key.partition(_DOWN)[0] for key in tensors.keys() if key.endswith(_DOWN)]  # noqa: SIM118
            # On this thread, because layers cannot run twice at a time; so only for what no adapter named before.
            for name in {self._find(module)[0] for module in modules} - self._bases.keys():
                self._bases[name] = base_weight(self._layers[name])
        except (CannotMergeError, OSError, SafetensorError) as error:
            self.refusal = str(error)
        else:
            self.begin(lambda: self._compute(self._read(folder)))

    def flip(self) -> None:
        """Installs what was prepared, in all layers at once. Only between two steps."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for install in self._installs:
            install()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._former, self._present, self._installs = self._present, self._next, []

    def _compute(self, parts: list[Part]) -> None:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))  # the engine binds its own thread to few cores
        self._next = parts
        with torch.no_grad():
            self._installs = [self._computed(name) for name in self._bases]

    def _computed(self, name: str) -> Callable[[], None]:
        layer, base = self._layers[name], self._bases[name]
        shards = [(part.shard, part.delta()) for part in self._next if part.layer == name]
        weight = merged(base, placed(layer, base.shape, shards))
        if hasattr(layer, "cpu_linear"):
            return packed(layer, weight)
        if name not in self._buffers:
            self._buffers[name] = torch.empty_like(base, pin_memory=torch.cuda.is_available())
        buffer = self._buffers[name].copy_(weight)
        return lambda: layer.weight.data.copy_(buffer, non_blocking=True)

    def _read(self, folder: Path) -> list[Part]:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / _WEIGHTS)
        parts = []
        for key in sorted(tensors):
            module, found, _ = key.partition(_DOWN)
            if found and (up := tensors.pop(f"{module}.lora_B.weight", None)) is not None:
                down, name = tensors.pop(key), module.removeprefix(_PREFIX)
                parts.append(Part(*self._find(module), down, up, scaling(config, name, len(down))))
        if tensors:
            raise CannotMergeError(f"{', '.join(sorted(tensors)[:3])}: not a pair of LoRA matrices of a linear layer")
        if not parts:
            raise CannotMergeError("the adapter is empty")
        return parts

    def _find(self, module: str) -> tuple[str, str | int | None]:
        """The engine's layer and shard for a module of the checkpoint."""
        module = module.removeprefix(_PREFIX)
        mapper: Any = getattr(self._model, "hf_to_vllm_mapper", None)
        if hasattr(mapper, "get_rename_mapper"):  # later releases of vLLM: it names fused layers otherwise
            mapper = mapper.get_rename_mapper()
        (name,) = mapper.apply_list([module]) if mapper else (module,)
        parent, _, leaf = name.rpartition(".")
        for fused, leaves in getattr(self._model, "packed_modules_mapping", {}).items():
            fused_name = f"{parent}.{fused}"
            if leaf in leaves and leaf != fused and fused_name in self._layers:
                shards = "qkv" if hasattr(self._layers[fused_name], "total_num_kv_heads") else range(len(leaves))
                return fused_name, shards[leaves.index(leaf)]
        layer: Any = self._layers.get(name)
        if not hasattr(layer, "weight_loader") or not (hasattr(layer, "input_size") or leaf == "lm_head"):
            raise CannotMergeError(f"{module} is no linear layer of the engine; take it out of lora.target_modules")
        if sum(getattr(other, "weight", None) is layer.weight for other in self._layers.values()) > 1:
            raise CannotMergeError(f"{module} shares its weight with another layer; take it out of lora.target_modules")
        return name, None


def scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """What PEFT multiplies B @ A of this module with."""
    alpha: float = next(
        (
            value
            for pattern, value in (config.get("alpha_pattern") or {}).items()
            if re.fullmatch(rf"(.*\.)?({pattern})", module)
        ),
        config["lora_alpha"],
    )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def merged(base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The sum, in float32 and rounded once."""
    return delta.add_(base).to(base.dtype)


def placed(layer: Any, shape: torch.Size, shards: list[tuple[str | int | None, torch.Tensor]]) -> torch.Tensor:
    """Differences of whole checkpoint modules as one of this worker's weight: fused and split as the layer loads them."""
    target = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
    target.output_dim, target.input_dim = 0, 1
    for shard, delta in shards:
        expected = getattr(layer, "input_size", delta.shape[1])
        if delta.shape[1] != expected:
            raise CannotMergeError(f"a module takes {delta.shape[1]} inputs, its layer in the engine {expected}")
        layer.weight_loader(target, delta, *(() if shard is None else (shard,)))
    return target.data


def base_weight(layer: Any) -> torch.Tensor:
    """A copy in host memory. vLLM's CPU build packs weights and drops the original: the layer's output for unit vectors is
    the same numbers, exactly, because nothing is added to each but zeros."""
    if layer.weight.numel():
        return layer.weight.detach().to("cpu", copy=True)
    unit = torch.eye(getattr(layer, "input_size_per_partition", layer.input_size), dtype=layer.weight.dtype)
    with torch.no_grad():
        columns = [layer.quant_method.apply(layer, rows, None) for rows in unit.split(_ROWS)]
    return torch.cat(columns).t().contiguous()


def packed(layer: Any, weight: torch.Tensor) -> Callable[[], None]:
    """Packs a weight as the layer does after loading; the result puts it in the place of the present one."""
    stand_in: Any = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(weight, requires_grad=False)
    stand_in.bias = getattr(layer, "bias", None)
    layer.quant_method.process_weights_after_loading(stand_in)

    def install() -> None:
        layer.cpu_linear = stand_in.cpu_linear
        if layer.weight.numel():
            layer.weight.data.copy_(weight)

    return install
