"""The map of a checkpoint: where each element lies in the parameters of vLLM's model.

Guarantee: the model's own loader was asked, tensor by tensor, and has copied nothing. Then all was read back: what is mapped
equals the checkpoint, in the engine's dtype, and all else is zero. A model for which this does not hold is refused, by the name
of a tensor. The checkpoint stays in its files, which are mapped into memory.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from producer.engine.exchange_worker import UnmappedError
from protocol.gpu.weights import weight_files
from protocol.wire.model_check import is_of_text_model
from protocol.wire.patch_streams import Bits, Places


class Checkpoint:
    """The tensors of the text model in a folder, rounded to a dtype of 16 bits."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        if dtype.itemsize != 2:
            raise UnmappedError(f"the engine computes in {dtype}, and patches are of 16 bits")
        self.dtype = dtype
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        self._sums: dict[str, int] = {}
        for path in weight_files(folder):
            file: Any = safe_open(path, "pt")
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if not is_of_text_model(name):
                    continue
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file
        if not self.shapes:
            raise UnmappedError(f"{folder} has no weights in *.safetensors")

    def flat(self, name: str) -> torch.Tensor:
        """Return the elements of a tensor in their order, as the file has them."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.reshape(-1)

    def bits(self, name: str, places: Places) -> Bits:
        """Return the elements of a tensor at these places."""
        return bits_of(self.flat(name)[torch.from_numpy(places)].to(self.dtype))

    def sum(self, name: str) -> int:
        """Return the sum of a tensor's elements, whose bits are uint16."""
        if name not in self._sums:
            self._sums[name] = int(bits_of(self.flat(name).to(self.dtype)).sum(dtype=np.uint64))
        return self._sums[name]


def bits_of(tensor: torch.Tensor) -> Bits:
    bits: Bits = tensor.view(torch.int16).numpy().view(np.uint16)
    return bits


class Dimension(NamedTuple):
    """The number of elements in a row, and the distance between them in the checkpoint's tensor and in the parameter."""

    size: int
    source: int
    target: int


class Block(NamedTuple):
    """A box of a checkpoint's tensor as it lies in a parameter, from an offset on in each, in elements. `dimensions` go from the
    longest distance in the source to the shortest."""

    parameter: str
    source_offset: int
    offset: int
    dimensions: tuple[Dimension, ...]

    def places(self, elements: Places) -> "tuple[slice | Places, Places]":
        """Return which of these elements of the tensor, in rising order, lie in this block, and their places in the parameter."""
        span = 1 + sum((dimension.size - 1) * dimension.source for dimension in self.dimensions)
        first, last = np.searchsorted(elements, [self.source_offset, self.source_offset + span])
        rest = elements[first:last] - self.source_offset
        if all(dimension.source == dimension.target == 1 for dimension in self.dimensions):  # one row at most
            return slice(first, last), rest + self.offset
        places, inside = np.full_like(rest, self.offset), np.ones(len(rest), bool)
        for dimension in self.dimensions:
            index, rest = np.divmod(rest, dimension.source)
            inside &= index < dimension.size
            places += index * dimension.target
        inside &= rest == 0
        return first + np.flatnonzero(inside), places[inside]

    def source_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this block of a tensor of the checkpoint, given flat."""
        sizes, distances = ([dimension[field] for dimension in self.dimensions] for field in (0, 1))
        return flat.as_strided(sizes, distances, flat.storage_offset() + self.source_offset)

    def target_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this block of the parameter, given flat."""
        sizes, distances = ([dimension[field] for dimension in self.dimensions] for field in (0, 2))
        return flat.as_strided(sizes, distances, flat.storage_offset() + self.offset)


def block_of(parameter: str, source: torch.Tensor, target: torch.Tensor, start: int) -> Block | None:
    """Return the block that a copy from `source` to `target` fills. `start` is the parameter's own offset in its storage. None if
    an element of the source is copied more than once."""
    each = sorted(map(Dimension, source.shape, source.stride(), target.stride()), key=lambda one: -one.source)
    dimensions: list[Dimension] = []
    for inner in [one for one in each if one.size != 1]:
        outer = dimensions[-1] if dimensions else None
        span = inner.size * inner.source
        if inner.source == 0 or (outer is not None and outer.source < span):
            return None
        if outer is not None and (outer.source, outer.target) == (span, inner.size * inner.target):
            dimensions[-1] = Dimension(outer.size * inner.size, inner.source, inner.target)
        else:
            dimensions.append(inner)
    return Block(parameter, source.storage_offset(), target.storage_offset() - start, tuple(dimensions))


def blocks_of(model: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, list[Block]]:
    """Ask the model's loader where it puts each tensor of these names and shapes. Raises UnmappedError if it does anything but
    copy it, in parts, to parameters."""
    owners: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        other, _ = owners.setdefault(_storage(parameter), (name, parameter.storage_offset()))
        if other != name:
            raise UnmappedError(f"{name} of the engine lies in the memory of {other}")
    found: dict[str, list[Block]] = {}

    def note(target: torch.Tensor, source: Any) -> None:
        if not isinstance(source, torch.Tensor) or _storage(source) != _storage(whole):
            raise UnmappedError(f"{tensor} is not loaded as it is")
        if _storage(target) not in owners or target.shape != source.shape:
            raise UnmappedError(f"{tensor} is not loaded into a parameter of its shape")
        block = block_of(owners[_storage(target)][0], source, target, owners[_storage(target)][1])
        if block is None:
            raise UnmappedError(f"an element of {tensor} is loaded more than once")
        found.setdefault(tensor, []).append(block)

    with _copies_to(note):
        for tensor, shape in shapes.items():
            whole = torch.empty(shape, dtype=dtype, device="meta")
            try:
                model.load_weights([(tensor, whole)])
            except UnmappedError:
                raise
            except Exception as error:
                raise UnmappedError(f"vLLM computes with {tensor} where it loads it ({error})") from error
    return found


def _storage(tensor: torch.Tensor) -> int:
    """Identify the memory of a tensor, also of one without any (meta)."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _copies_to(note: Callable[[torch.Tensor, Any], None]) -> Iterator[None]:
    """Call `note` in place of each copy to a tensor that this thread makes meanwhile."""
    before, copy, thread = vars(torch.Tensor).get("copy_"), torch.Tensor.copy_, threading.get_ident()

    def noted(target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        if threading.get_ident() != thread:
            return copy(target, source, non_blocking)
        note(target, source)
        return target

    torch.Tensor.copy_ = noted
    try:
        yield
    finally:
        if before is None:
            del torch.Tensor.copy_
        else:
            torch.Tensor.copy_ = before


def flat_bits(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a parameter as integers, in its own memory. A float32 that holds a bfloat16 has its bits in front.
    Raises UnmappedError if it holds elements of another kind."""
    data = parameter.data
    if data.dtype not in (dtype, torch.float32) or (data.dtype != dtype and dtype != torch.bfloat16):
        raise UnmappedError(f"it has elements of {data.dtype}")
    if not data.is_contiguous():
        raise UnmappedError("its rows do not lie one after the other")
    return data.view(-1).view(torch.int16 if data.dtype == dtype else torch.int32)


def sum_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of elements as signed numbers, int64 without a dimension."""
    return (flat if flat.dtype == torch.int16 else flat >> 16).sum(dtype=torch.int64)


def read_back(model: Any, checkpoint: Checkpoint, blocks: Mapping[str, list[Block]]) -> dict[str, int]:
    """Return the sum of the bits of each parameter, as `sum_of` has it, after all elements were compared. Raises UnmappedError if
    the model has other weights than the checkpoint. Compares on the host, parameter by parameter."""
    by_parameter: dict[str, list[tuple[str, Block]]] = {}
    for tensor, its_blocks in blocks.items():
        for block in its_blocks:
            by_parameter.setdefault(block.parameter, []).append((tensor, block))
    sums = {}
    for name, parameter in model.named_parameters():
        try:
            flat = flat_bits(parameter, checkpoint.dtype).cpu()
        except UnmappedError as error:
            raise UnmappedError(f"{name} of the engine is laid out otherwise than the checkpoint: {error}") from error
        is_mapped = torch.zeros(len(flat), dtype=torch.bool)
        values = flat.view(parameter.dtype)
        for tensor, block in by_parameter.get(name, ()):
            expected = block.source_view(checkpoint.flat(tensor)).to(checkpoint.dtype).to(values.dtype)
            if not torch.equal(block.target_view(values).contiguous().view(flat.dtype), expected.view(flat.dtype)):
                raise UnmappedError(
                    f"{name} of the engine is not {tensor} of the checkpoint: vLLM lays it out otherwise"
                )
            block.target_view(is_mapped).fill_(True)
        if bool(flat[~is_mapped].any()):  # a padded vocabulary has zeros
            raise UnmappedError(f"{name} of the engine comes from no tensor of the checkpoint")
        sums[name] = int(sum_of(flat))
    return sums
