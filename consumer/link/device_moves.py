"""The trainer's weights and optimizer on their way between its device and host memory.

Guarantee: every tensor has the very same bits afterwards, and stays the same object, so that optimizer, PEFT and all others that
hold it need not know; tensors that share memory still do. Frozen weights are copied in one direction only, because what the host
has of them stays right. A move is whole, or raises what the device raised and nothing has moved.
"""

import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

Kept = Callable[[], Iterable[torch.Tensor]]
"""The tensors that take memory of the device between two steps."""


class _Piece:
    """A piece of memory: the tensors that lie in it."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensors[0].untyped_storage()

    @property
    def is_frozen(self) -> bool:
        return all(isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad for tensor in self.tensors)

    def repoint(self, storage: torch.UntypedStorage) -> None:
        """Make the tensors use a storage with the same contents."""
        for tensor in self.tensors:
            there: Any = torch.empty(0, dtype=tensor.dtype, device=storage.device)
            there.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = there


class DeviceMoves:
    """Moves of tensors that are in host memory at first. The copy in host memory, pinned for a GPU, is allocated once.

    Args:
        forget: drops tensors that are not needed any more when the others leave.
    """

    def __init__(self, device: torch.device, kept: Kept, forget: Callable[[], None] = lambda: None) -> None:
        self._device, self._kept, self._forget = device, kept, forget
        self._hosts: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}  # by the first tensor of a piece
        self._has_left = False

    @property
    def num_bytes(self) -> int:
        """The bytes that `back` takes of the device."""
        return sum(piece.storage.nbytes() for piece in self._to_come_back())

    def back(self) -> None:
        """Move to the device: at first everything, then what came from there."""
        pieces = self._to_come_back()
        if self._device.type == "cuda" and not self._has_left:
            for piece in pieces:  # one after the other, so that no second copy of all is needed
                piece.repoint(piece.storage.pin_memory())
        arrived = [self._copied(piece.storage, self._on_device(piece.storage.nbytes())) for piece in pieces]
        self._hosts = {id(piece.tensors[0]): (piece.tensors[0], piece.storage) for piece in pieces}
        self._finish(pieces, arrived)

    def out(self) -> None:
        """Move to host memory, and free the device's memory for others."""
        self._forget()
        gc.collect()  # a training that has ended leaves cycles that hold tensors
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
        """Return the free bytes of the device; infinite for a CPU."""
        if self._device.type != "cuda":
            return math.inf
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(self._device)[0])

    def _pieces(self) -> Iterable[_Piece]:
        found: dict[int, _Piece] = {}
        for tensor in self._kept():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), _Piece()).tensors.append(tensor)
        return found.values()

    def _to_come_back(self) -> list[_Piece]:
        return [piece for piece in self._pieces() if not self._has_left or id(piece.tensors[0]) in self._hosts]

    def _to_host(self, piece: _Piece) -> torch.UntypedStorage:
        size = piece.storage.nbytes()
        _, host = self._hosts.get(id(piece.tensors[0]), (None, None))
        if host is not None and host.nbytes() == size:
            return host if piece.is_frozen else self._copied(piece.storage, host)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda").untyped_storage()
        return self._copied(piece.storage, host)

    def _on_device(self, size: int) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()

    @staticmethod
    def _copied(source: torch.UntypedStorage, target: torch.UntypedStorage) -> torch.UntypedStorage:
        return target.copy_(source, non_blocking=True)

    def _finish(self, pieces: list[_Piece], storages: list[torch.UntypedStorage]) -> None:
        """Give the tensors their new places. This is the last step, so a device without room changes nothing."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for piece, storage in zip(pieces, storages, strict=True):
            piece.repoint(storage)
