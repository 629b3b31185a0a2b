"""The comparison of a worker's LoRA slots with the adapter that was published, bit by bit.

Guarantee: an adapter that passes is in the tensors that vLLM's kernels read. Each number is cast, scaled, split and fused as this
worker has to hold it, and the rest of its slot is zero. Each of its modules has such a slot, in a layer that the model does not
reach without its adapter. On a GPU the host waits once for all tensors. Experts, and the results of kernels, are not compared.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from producer.engine.published import Pair, PartlyServedError, PublishedAdapter, listed, loaded

_MATRIX = ".lora_A.weight"  # vLLM renames tensors, not modules


class Wanted(NamedTuple):
    """A slot for one matrix of a module, and the numbers that it has to hold. None stands for zeros."""

    module: str
    matrix: str
    slot: torch.Tensor
    numbers: torch.Tensor | None


class AdapterProof:
    """The layers of vLLM's `LoRAModelManager` that have slots for adapters. The model stays as it is from here on."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._renames = mapper.get_rename_mapper() if mapper else None
        self._parts: dict[str, list[str]] = {
            name: manager.packed_modules.get(name) or [name] for name in manager.modules
        }
        modules = dict(manager.model.named_modules(remove_duplicate=False))
        # These are layers of another worker of a pipeline.
        self._elsewhere = tuple(f"{name}." for name, each in modules.items() if type(each).__name__ == "PPMissingLayer")
        self._bypassed = bypassed(modules, manager.modules)

    def check_modules(self, published: PublishedAdapter) -> None:
        """Raise PartlyServedError if the layers have no place for a module of the adapter, or if the adapter has no module of a
        kind that it targets."""
        named = self._named(published)
        served = {part for parts in self._parts.values() for part in parts}
        served |= {
            f"{name}{end}"
            for name, layer in self._manager.modules.items()
            if _is_experts(layer)
            for end in ("", ".base_layer")
        }
        if unserved := [name for name in named if name not in served and not name.startswith(self._elsewhere)]:
            raise PartlyServedError(
                f"vLLM serves no adapter of {listed(unserved)}; check lora.target_modules of the producer"
            )
        if lost := [name for name in self._bypassed if not named.keys().isdisjoint(self._parts[name])]:
            raise PartlyServedError(
                f"vLLM computes {listed(lost)} without an adapter; take it out of lora.target_modules"
            )
        missing = {leaf(name) for name in served} - {leaf(name) for name in named}
        if absent := [kind for kind in sorted(missing) if published.targets(kind)]:
            raise PartlyServedError(
                f"the published adapter targets {listed(absent)} and has no such module; the trainer published a part of it"
            )

    def compare(self, adapter_id: int, published: PublishedAdapter) -> None:
        """Raise PartlyServedError unless the slots of vLLM's adapter `adapter_id` hold the published adapter."""
        slots = self._manager.lora_index_to_id
        if adapter_id not in slots:
            raise PartlyServedError("vLLM says that the adapter is loaded, but none of its slots has it")
        named = self._named(published)
        all_wanted = [
            wanted
            for name, layer in self._manager.modules.items()
            if not _is_experts(layer)
            for wanted in wanted_of(
                layer, slots.index(adapter_id), [(part, named.get(part)) for part in self._parts[name]]
            )
        ]
        flags = [differs(wanted) for wanted in all_wanted]
        found = torch.stack(flags).tolist() if flags else []
        if wrong := [f"{one.module} ({one.matrix})" for one, differ in zip(all_wanted, found, strict=True) if differ]:
            raise PartlyServedError(
                f"the engine holds other numbers than were published for {listed(wrong)}; it would not sample from this policy"
            )

    def _named(self, published: PublishedAdapter) -> dict[str, Pair]:
        """Return the pairs by vLLM's names of their modules."""
        if self._renames is None:
            return published.pairs
        names = self._renames.apply_list([f"{module}{_MATRIX}" for module in published.pairs])
        return {name.removesuffix(_MATRIX): pair for name, pair in zip(names, published.pairs.values(), strict=True)}


def bypassed(modules: dict[str, Any], wrapped: dict[str, Any]) -> list[str]:
    """Return the names in `wrapped` of layers that the model does not reach, or reaches without their adapter. `modules` are all
    modules of the model, by each of their names."""
    wrappers = {id(layer) for layer in wrapped.values()}
    reached = {id(module) for module in modules.values()}
    bare = {id(module) for name, module in modules.items() if id(modules.get(name.rpartition(".")[0])) not in wrappers}
    return [name for name, layer in wrapped.items() if id(layer) not in reached or id(layer.base_layer) in bare]


def wanted_of(layer: Any, index: int, parts: list[tuple[str, Pair | None]]) -> Iterator[Wanted]:
    """Yield the numbers that slot `index` of a layer has to hold, given the pairs of its parts in their order."""
    downs, ups = (_slots(stacked, index) for stacked in (layer.lora_a_stacked, layer.lora_b_stacked))
    sizes = None if len(parts) == len(ups) else list(layer.output_sizes)
    for number, (name, pair) in enumerate(by_slice(parts, sizes)):
        down = up = None
        if pair is not None:
            down, up = pair.down.to(downs[number].dtype), pair.up.to(ups[number].dtype)
            up = up if pair.scaling == 1 else up * pair.scaling
            down, up = _of_this_worker(layer, number, (down, up), downs[number], ups)
        yield Wanted(name, "lora_A", downs[number], down)
        yield Wanted(name, "lora_B", ups[number], up)


def by_slice(parts: list[tuple[str, Pair | None]], sizes: list[int] | None) -> "Iterator[tuple[str, Pair | None]]":
    """Yield the pair of each slice of a layer. Without `sizes` a part is one slice. With `sizes`, the numbers of outputs of all
    slices, a part may be several slices in a row that share A. A part that is absent is then the last one."""
    left = list(sizes or ())
    for name, pair in parts:
        if sizes is None:
            yield name, pair
        elif pair is None:
            yield from ((name, None) for _ in left)
        else:
            start = 0
            while start < len(pair.up):
                size = left.pop(0)
                yield name, pair._replace(up=pair.up[start : start + size])
                start += size


def differs(wanted: Wanted) -> torch.Tensor:
    """Return whether the slot holds other bits than it should, by a tensor () of bool on its device."""
    slot, numbers = wanted.slot, wanted.numbers
    if numbers is None:
        return _bits(slot).any()
    if slot.device.type == "cpu":
        return torch.tensor(not torch.equal(*_words(slot, numbers)))
    return torch.ne(*_words(slot, numbers.to(slot.device, non_blocking=True))).any()


def leaf(module: str) -> str:
    """Return the last part of a module's name."""
    return module.rpartition(".")[2]


def _of_this_worker(
    layer: Any, number: int, pair: tuple[torch.Tensor, torch.Tensor], slot_down: torch.Tensor, ups: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of slice `number` as this worker holds them, in the shapes of their slots."""
    (down, up), base = pair, layer.base_layer
    if down.shape[1] > slot_down.shape[1]:
        down = loaded(base, (len(down), slot_down.shape[1]), down, (), input_dim=1)
    elif len(up) > len(ups[number]):
        rows = [len(slot) for slot in ups]
        fused = () if len(ups) == 1 else ("qkv"[number] if hasattr(base, "total_num_kv_heads") else number,)
        whole = loaded(base, (sum(rows), up.shape[1]), up, fused, output_dim=0)
        up = whole[sum(rows[:number]) : sum(rows[: number + 1])]
    rank = getattr(layer, "tp_rank", 0)
    return _fitted(down, slot_down, rank), _fitted(up, ups[number], rank)


def _fitted(matrix: torch.Tensor, slot: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the matrix with zeros up to the slot's shape. Along a dimension that vLLM splits for adapters alone
    (`fully_sharded_loras`) it is the part of worker `rank`."""
    for dim, size in enumerate(slot.shape):
        if matrix.shape[dim] > size:
            matrix = matrix.narrow(
                dim, start := min(rank * size, matrix.shape[dim]), min(size, matrix.shape[dim] - start)
            )
    rows, columns = (size - own for size, own in zip(slot.shape, matrix.shape, strict=True))
    return pad(matrix, (0, columns, 0, rows)) if rows or columns else matrix


def _slots(stacked: Any, index: int) -> list[torch.Tensor]:
    """Return the slot of each slice as a matrix. A layer of one slice may have a tensor in place of a tuple. Embeddings have A
    transposed."""
    slots = [each[index] for each in (stacked if isinstance(stacked, tuple) else (stacked,))]
    return [slot[0] if slot.dim() == 3 else slot.t() for slot in slots]


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view({2: torch.int16, 4: torch.int32}[numbers.element_size()])


def _words(*matrices: torch.Tensor) -> list[torch.Tensor]:
    """Return the bits of matrices of one shape and dtype, as words of eight bytes where their memory allows it."""
    width = matrices[0].shape[-1] * matrices[0].element_size()
    if width % 8 == 0 and all(matrix.is_contiguous() and matrix.data_ptr() % 8 == 0 for matrix in matrices):
        return [matrix.view(torch.int64) for matrix in matrices]
    return [_bits(matrix) for matrix in matrices]


def _is_experts(layer: Any) -> bool:
    return hasattr(layer, "w13_lora_a_stacked")
