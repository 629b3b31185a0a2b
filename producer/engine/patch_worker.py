"""Patching the engine's own weights, inside vLLM's worker processes (`lora: null`).

Guarantee: each set of weights is the checkpoint that was loaded XOR one patch, or two: an anchor's, and one on it. So the same
patch gives the same bits after any number of swaps, in any order, and the former weights come back bit for bit. A patch that does
not fit the checkpoint, or does not give the sums that were published with it, is refused before anything changes. Each worker
changes its own part of a tensor. Patches are decoded in a thread; between two engine steps there is only the flip. (vLLM's layers
are used by their attributes.)

Memory: the present patch and the former one stay in host memory, with 12 bytes for each of their changes. vLLM's CPU build keeps
weights that it would drop once they are packed. There, from the preparation to the flip, there is one more copy of each parameter
that changes, and one of its packed form. On a GPU there are 10 bytes for each change of the present patch and of the next one, or
a copy of the parameter if that is less, and 160 MiB while it is made.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from producer.engine.adapter_worker import own_stream, state_after
from producer.engine.exchange_worker import Exchange, ExchangeWorker, UnmappedError, use_all_cores
from producer.engine.merged_proof import COLUMNS
from producer.engine.packed_layers import columns_of, packed_linear
from producer.engine.published import PartlyServedError, listed
from producer.engine.weight_map import Checkpoint, blocks_of, flat_bits, read_back, sum_of
from protocol.wire.patch_streams import composed
from protocol.wire.weight_patch import read

_CHANGES = 2**24  # that are brought to a GPU at a time


class PatchWorker(ExchangeWorker):
    """The methods that vLLM adds to its workers (`worker_extension_cls`)."""

    def __new__(cls, *_: Any, **__: Any) -> "PatchWorker":
        _keep_weights()
        return super().__new__(cls)

    def make_weights(self) -> "Patcher":
        return Patcher(self.get_model(), Path(self.model_config.model), self.model_config.dtype)  # type: ignore[attr-defined]


def _keep_weights() -> None:
    """Have vLLM's CPU build keep weights once they are packed. Called before the model is loaded."""
    import vllm.model_executor.layers.utils as layers

    dispatch = layers.dispatch_cpu_unquantized_gemm
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: dispatch(layer, remove_weight=False)


class Change(NamedTuple):
    """Elements of a parameter in the checkpoint and after a patch, by their places (int64); bits are int16."""

    parameter: str
    places: torch.Tensor
    base: torch.Tensor
    patched: torch.Tensor

    @property
    def difference(self) -> int:
        """The sum of the bits after the patch less that before, as `sum_of` has them."""
        return int(sum_of(self.patched)) - int(sum_of(self.base))


class Patcher(Exchange):
    """The model's parameters, their map, and the patches that its weights have, had and get. Raises UnmappedError if the model
    does not have the weights of the checkpoint."""

    def __init__(self, model: Any, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self._parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self._device = next(iter(self._parameters.values())).device
        self._checkpoint = Checkpoint(folder, dtype)
        self._blocks = blocks_of(model, self._checkpoint.shapes, dtype)
        self._sums = read_back(model, self._checkpoint, self._blocks)
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._packed = [
            (names[id(module.weight)], module) for module in model.modules() if hasattr(module, "cpu_linear")
        ]
        self._former: list[Change] = []
        self._present: list[Change] = []
        self._next: list[Change] = []
        self._installs: list[Callable[[], None]] = []
        self._path = ""  # of the patch that comes next
        self._num_patches = 0
        if wrong := [name for name, layer in self._packed if not torch.equal(*self._columns(layer))]:
            raise UnmappedError(f"vLLM does not compute with {listed(wrong)} as the checkpoint has it")

    def prepare(self, folder: Path | None, checksum: int | None = None) -> None:
        self._installs, self._next = [], self._present
        self._path = "" if folder is None else str(folder)
        self.begin(lambda: self._make(self._former if folder is None else self._read(folder, checksum)), self._path)

    def install(self) -> None:
        for install in self._installs:
            install()
        self._former, self._present = self._present, self._next

    def prove(self) -> None:
        """Compare all elements that the patch changes, and the sums of all parameters, in a thread. Packed layers that a patch
        has changed show some columns on this one, because a layer cannot run twice at a time."""
        self._installs = []
        self._num_patches += 1
        changed = {change.parameter for change in (*self._former, *self._present)}
        try:
            shown = [(name, *self._columns(layer)) for name, layer in self._packed if name in changed]
        except Exception as error:
            self.state = state_after(error)
            return
        self.begin(lambda: self._compare(shown), self._path)

    def _columns(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some columns as a packed layer computes with them, and as its weight has them. Others at each swap."""
        num_inputs = layer.weight.shape[1]
        count = min(COLUMNS, num_inputs)
        columns = (self._num_patches + torch.arange(count) * num_inputs // count) % num_inputs
        return _bits(columns_of(layer, columns, num_inputs)), _bits(layer.weight.data[:, columns])

    def _compare(self, shown: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        use_all_cores()
        expected = dict(self._sums)
        for change in self._present:
            expected[change.parameter] += change.difference
        with torch.no_grad(), own_stream(self._device):
            found = [sum_of(self._flat(name)) for name in expected]
            found += [self._num_others(each) for each in self._present]
            numbers = torch.stack(found).tolist()
        wrong = {name for name, number in zip(expected, numbers, strict=False) if number != expected[name]}
        wrong |= {
            each.parameter for each, number in zip(self._present, numbers[len(expected) :], strict=True) if number
        }
        wrong |= {name for name, held, weight in shown if not torch.equal(held, weight)}
        if wrong:
            raise PartlyServedError(
                f"the weights of {listed(wrong)} are not the checkpoint with the published patch; the engine would not sample "
                "from this policy"
            )

    def _make(self, patch: list[Change]) -> None:
        """Make the weights of a patch, or on a GPU what turns the present ones into them."""
        use_all_cores()
        changes = [(each.parameter, each.places, each.base) for each in self._present]
        changes += [(each.parameter, each.places, each.patched) for each in patch]
        with torch.no_grad():
            if self._device.type == "cpu":
                installs = self._exchanges(changes)
            else:
                with own_stream(self._device):
                    installs = self._writes(changes)
        self._next, self._installs = patch, installs

    def _exchanges(self, changes: list[tuple[str, torch.Tensor, torch.Tensor]]) -> list[Callable[[], None]]:
        fresh = {name: self._parameters[name].data.clone() for name, *_ in changes}
        for name, *change in changes:
            flat = flat_bits(fresh[name], self._checkpoint.dtype)
            write(flat, staged(flat, *change))
        linears = [(layer, packed_linear(layer, fresh[name])) for name, layer in self._packed if name in fresh]

        def exchange() -> None:
            for layer, linear in linears:
                layer.cpu_linear = linear
            for name, weight in fresh.items():
                self._parameters[name].data = weight

        return [exchange]

    def _writes(self, changes: list[tuple[str, torch.Tensor, torch.Tensor]]) -> list[Callable[[], None]]:
        """Bring changes to the GPU: each by itself, or as a fresh copy of its parameter where that is smaller."""
        of: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for name, places, bits in changes:
            of.setdefault(name, []).append((places, bits))
        installs: list[Callable[[], None]] = []
        for name, its_changes in of.items():
            flat = self._flat(name)
            if (8 + flat.itemsize) * sum(len(places) for places, _ in its_changes) < flat.nbytes:
                installs += [writer(flat, *change) for change in its_changes]
                continue
            fresh = flat.clone()
            for change in its_changes:
                write(fresh, staged(fresh, *change))
            installs.append(partial(flat.copy_, fresh))
        return installs

    def _num_others(self, change: Change) -> torch.Tensor:
        flat = self._flat(change.parameter)
        pieces = staged(flat, change.places, change.patched)
        return torch.stack([(flat[places] != bits).sum() for places, bits in pieces]).sum()

    def _flat(self, name: str) -> torch.Tensor:
        return flat_bits(self._parameters[name], self._checkpoint.dtype)

    def _read(self, folder: Path, checksum: int | None) -> list[Change]:
        found = []
        for tensor, places, bits in composed(read(folder, checksum, self._checkpoint.shapes)):
            base = self._checkpoint.bits(tensor.name, places)
            patched = base ^ bits
            change = int(patched.sum(dtype=np.int64)) - int(base.sum(dtype=np.int64))
            if self._checkpoint.sum(tensor.name) + change != tensor.sum:
                raise PartlyServedError(f"the patch of {tensor.name} does not give the sum that was published with it")
            blocks = self._blocks.get(tensor.name, [])
            if len(places) and not blocks:
                raise PartlyServedError(f"the patch changes {tensor.name}, which the engine does not use")
            for block in blocks:
                kept, its_places = block.places(places)
                base_bits, patched_bits = (torch.from_numpy(each[kept].view(np.int16)) for each in (base, patched))
                found.append(Change(block.parameter, torch.from_numpy(its_places), base_bits, patched_bits))
        return found


def staged(flat: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bring places and int16 bits, piece by piece, to a parameter of `flat_bits`: on its device, with its kind of integers."""
    for its_places, its_bits in zip(places.split(_CHANGES), bits.split(_CHANGES), strict=True):
        there = its_bits.to(flat.device)
        yield its_places.to(flat.device), there if flat.dtype == torch.int16 else there.to(flat.dtype) << 16


def write(flat: torch.Tensor, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write pieces that `staged` brought."""
    for places, bits in pieces:
        flat.scatter_(0, places, bits)


def writer(flat: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> Callable[[], None]:
    """Bring a change to the device of a parameter. The result writes it, and allocates nothing."""
    return partial(write, flat, list(staged(flat, places, bits)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)
