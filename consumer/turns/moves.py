"""The trainer's weights and optimizer on their way between its device and host memory.

Guarantee: every tensor has the very same bits afterwards, and stays the same object, so that optimizer, PEFT and whoever else
holds it need not know; tensors that share memory still do. Frozen weights are copied in one direction only, because what the host
has of them stays right. A move is whole, or raises what the device raised and nothing has moved.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

Kept = Callable[[], Iterable[torch.Tensor]]
"""The tensors that take memory of the device between two steps."""


class _Move(NamedTuple):
    """A piece of memory, and the tensors that lie in it."""

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor]


class DeviceMoves:
    """Of tensors that lie in host memory at first. The copy in host memory, pinned for a GPU, is allocated once."""

    def __init__(self, device: torch.device, kept: Kept) -> None:
        self._device, self._kept = device, kept
        self._hosts: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}  # by the first tensor of a piece
        self._has_left = False

    @property
    def num_bytes(self) -> int:
        """That `back` takes of the device."""
        return sum(piece.storage.nbytes() for piece in self._to_come_back())

    def back(self) -> None:
        """To the device: at first everything, then what came from there."""
        pieces = self._to_come_back()
        arrived = [self._copied(piece.storage, self._on_device(piece.storage.nbytes())) for piece in pieces]
        self._hosts = {id(piece.tensors[0]): (piece.tensors[0], piece.storage) for piece in pieces}
        self._finish(pieces, arrived)

    def out(self) -> None:
        """To host memory; what the device has no use for is free for others."""
        pieces = [piece for piece in self._pieces() if piece.storage.device.type == self._device.type]
        hosts = [self._to_host(piece) for piece in pieces]
        self._hosts = {
            id(piece.tensors[0]): (piece.tensors[0], host) for piece, host in zip(pieces, hosts, strict=True)
        }
        self._has_left = True
        self._finish(pieces, hosts)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def free_bytes(self) -> float:
        """Of the device; infinite for a CPU."""
        if self._device.type != "cuda":
            return math.inf
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(self._device)[0])

    def _pieces(self) -> Iterable[_Move]:
        found: dict[int, _Move] = {}
        for tensor in self._kept():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), _Move(storage, [])).tensors.append(tensor)
        return found.values()

    def _to_come_back(self) -> list[_Move]:
        return [piece for piece in self._pieces() if not self._has_left or id(piece.tensors[0]) in self._hosts]

    def _to_host(self, piece: _Move) -> torch.UntypedStorage:
        first, size = piece.tensors[0], piece.storage.nbytes()
        _, host = self._hosts.get(id(first), (None, None))
        is_new = host is None or host.nbytes() != size
        if is_new:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda").untyped_storage()
        assert host is not None
        is_frozen = all(isinstance(each, torch.nn.Parameter) and not each.requires_grad for each in piece.tensors)
        return host if is_frozen and not is_new else self._copied(piece.storage, host)

    def _on_device(self, size: int) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()

    @staticmethod
    def _copied(source: torch.UntypedStorage, target: torch.UntypedStorage) -> torch.UntypedStorage:
        return target.copy_(source, non_blocking=True)

    def _finish(self, pieces: list[_Move], storages: list[torch.UntypedStorage]) -> None:
        """Only now do tensors change their place, so that a device without room changes nothing."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for piece, storage in zip(pieces, storages, strict=True):
            for tensor in piece.tensors:
                there: Any = torch.empty(0, dtype=tensor.dtype, device=storage.device)
                there.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
                tensor.data = there
