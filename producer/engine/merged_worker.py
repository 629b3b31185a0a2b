"""Merging LoRA adapters into the engine's own weights, inside vLLM's worker processes (`swap.mode: merged`).

Guarantee: each set of weights is round(base + scaling * B @ A), computed in float32 from the base that was loaded. So the same
adapter gives the same bits after any number of swaps. Each worker computes its own part of a layer, on the device of the layer,
block by block, in a thread and on a CUDA stream of its own. Between two engine steps there is only the flip. An adapter that
would be served in part is refused. (vLLM's layers are used by their attributes: there is no import.)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from producer.engine.adapter_worker import own_stream, state_after
from producer.engine.exchange_worker import Exchange, ExchangeWorker, use_all_cores
from producer.engine.merged_proof import Evidence, evidence_of, prove, row_sums
from producer.engine.packed_layers import columns_of, is_packed, packed, unpacked
from producer.engine.published import Part, PartlyServedError, loaded, read_published
from producer.engine.swap_proof import leaf

_BLOCK = {"cpu": 2**19, "cuda": 2**24}  # elements that are merged at a time


class MergeWorker(ExchangeWorker):
    """The methods that vLLM adds to its workers (`worker_extension_cls`)."""

    def make_weights(self) -> "Merger":
        return Merger(self.get_model())  # type: ignore[attr-defined]


class Merger(Exchange):
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
        self._evidence: list[Evidence] = []  # of the weights that come next, until they are proved
        self._path = ""  # of their adapter
        self._num_merges = 0

    def prepare(self, folder: Path | None, checksum: int | None = None) -> None:
        self._installs = []
        self._path = "" if folder is None else str(folder)
        if folder is None:
            self.begin(lambda: self._compute(self._former))
            return
        try:
            for name in {self._find(module)[0] for module in read_published(folder, None).pairs} - self._bases.keys():
                if is_packed(self._layers[name]):  # on this thread, because a layer cannot run twice at a time
                    self._bases[name] = unpacked(self._layers[name])
        except Exception as error:
            self.state = state_after(error)
        else:
            self.begin(lambda: self._compute(self._read(folder, checksum)), self._path)

    def install(self) -> None:
        for install in self._installs:
            install()
        self._former, self._present, self._installs = self._present, self._next, []

    def prove(self) -> None:
        """Compare the present weights with the computed ones, in a thread. Packed layers show their columns on this one, because
        a layer cannot run twice at a time. Called between two steps, after the flip."""
        evidence, self._evidence = self._evidence, []
        layers = {each.layer: self._layers[each.layer] for each in evidence}
        try:
            shown = {
                each.layer: columns_of(layers[each.layer], each.columns, self._bases[each.layer].shape[1])
                for each in evidence
                if each.merged is not None
            }
        except Exception as error:
            self.state = state_after(error)
            return
        weights = {name: layer.weight.data for name, layer in layers.items() if name not in shown}

        def compare() -> None:
            with torch.no_grad(), own_stream(next(self._model.parameters()).device):
                self.survival = prove(evidence, weights, shown)

        self.begin(compare, self._path)

    def _compute(self, parts: list[Part]) -> None:
        use_all_cores()
        by_layer: dict[str, list[Part]] = {name: [] for name in self._bases}
        for part in parts:
            by_layer.setdefault(part.layer, []).append(part)
        device = next(self._model.parameters()).device
        self._num_merges += 1
        with torch.no_grad(), own_stream(device):
            computed = [self._computed(name, device, named) for name, named in by_layer.items()]
        self._next, self._installs = parts, [install for install, _ in computed]
        self._evidence = [evidence for _, evidence in computed]

    def _computed(self, name: str, device: torch.device, parts: list[Part]) -> tuple[Callable[[], None], Evidence]:
        layer = self._layers[name]
        if name not in self._bases:
            self._bases[name] = _in_host_memory(layer.weight).copy_(layer.weight)
        base = self._bases[name]
        is_cpu_linear = hasattr(layer, "cpu_linear")
        if is_cpu_linear or name not in self._buffers:
            self._buffers[name] = _in_host_memory(base)
        buffer = self._buffers.pop(name) if is_cpu_linear else self._buffers[name]
        sums = merge(base, *factors(layer, base.shape, parts), buffer, device)
        merged = buffer if is_cpu_linear else None
        evidence = evidence_of(name, layer, base, parts, sums, self._num_merges, merged)
        if is_cpu_linear:
            return packed(layer, buffer), evidence
        return lambda: layer.weight.data.copy_(buffer, non_blocking=True), evidence

    def _read(self, folder: Path, checksum: int | None) -> list[Part]:
        pairs = read_published(folder, checksum).pairs
        return [Part(leaf(module), *self._find(module), *pair) for module, pair in pairs.items()]

    def _find(self, module: str) -> tuple[str, str | int | None]:
        """Return the engine's layer and shard for a module of the checkpoint."""
        mapper: Any = getattr(self._model, "hf_to_vllm_mapper", None)
        (name,) = mapper.get_rename_mapper().apply_list([module]) if mapper else (module,)
        parent, _, last = name.rpartition(".")
        for fused, leaves in getattr(self._model, "packed_modules_mapping", {}).items():
            fused_name = f"{parent}.{fused}"
            if last in leaves and last != fused and fused_name in self._layers:
                shards = "qkv" if hasattr(self._layers[fused_name], "total_num_kv_heads") else range(len(leaves))
                return fused_name, shards[leaves.index(last)]
        layer: Any = self._layers.get(name)
        if not hasattr(layer, "weight_loader") or not (hasattr(layer, "input_size") or last == "lm_head"):
            raise PartlyServedError(f"{module} is no linear layer of the engine; take it out of lora.target_modules")
        if sum(getattr(other, "weight", None) is layer.weight for other in self._layers.values()) > 1:
            raise PartlyServedError(
                f"{module} shares its weight with another layer; take it out of lora.target_modules"
            )
        return name, None


def merge(
    base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, out: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Write round(base + up @ down) into `out`, and return the sums of its rows, on the device. `base` and `out` are on the host.
    On a GPU the caller synchronizes."""
    up, down = up.to(device), down.to(device)
    sums = torch.empty(len(base), dtype=torch.int64, device=device)
    num_rows = max(1, min(len(base), _BLOCK[device.type] // base.shape[1]))
    total = torch.empty(num_rows, base.shape[1], device=device)
    for start in range(0, len(base), num_rows):
        rows = slice(start, min(start + num_rows, len(base)))
        block = total[: rows.stop - start].copy_(base[rows].to(device, non_blocking=True))
        block.addmm_(up[rows], down)
        rounded = out[rows].copy_(block) if device.type == "cpu" else block.to(out.dtype)
        sums[rows] = row_sums(rounded)
        if device.type != "cpu":
            out[rows].copy_(rounded, non_blocking=True)
    return sums


def factors(layer: Any, shape: torch.Size, parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this worker's part of scaling * B @ A of all modules of a layer whose weight has this shape here: (outputs, R) and
    (R, inputs) in float32, fused and split as the layer loads its weight."""
    ups, downs = [torch.zeros(shape[0], 0)], [torch.zeros(0, shape[1])]
    for part in parts:
        rank, num_inputs = part.down.shape
        expected = getattr(layer, "input_size", shape[1])
        if num_inputs != expected:
            raise PartlyServedError(f"a module takes {num_inputs} inputs, its layer in the engine {expected}")
        shard = () if part.shard is None else (part.shard,)
        ups.append(loaded(layer, (shape[0], rank), part.scaling * part.up.float(), shard, output_dim=0))
        down = part.down.float()
        downs.append(down if shape[1] == expected else loaded(layer, (rank, shape[1]), down, (), input_dim=1))
    return torch.cat(ups, 1), torch.cat(downs)


def _in_host_memory(like: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor like this one, pinned where there is a GPU, which copies from there beside its other work."""
    return torch.empty_like(like, device="cpu", pin_memory=torch.cuda.is_available())
