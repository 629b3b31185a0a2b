"""Which daemons of this user are on a GPU of this host, and which of them may change how much of its memory is free.

Guarantee: of two daemons on a GPU the second one learns of the first, and a daemon that ended, however it did, is nobody's
neighbour any more, because the kernel drops its locks. Daemons of other users, and in containers that do not share `/dev/shm`,
are not seen; where there is no memory for files nobody is.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.errors import StalledError
from protocol.files.scratch import common_folder, private
from protocol.files.shared_memory import ROOT

Role = Literal["trainer", "producer"]
ROLES: tuple[Role, ...] = ("trainer", "producer")

_PAUSE_S = 0.2
_LONGEST_NOTE = 4096  # bytes


@dataclass(frozen=True)
class Neighbour:
    """Another daemon on the GPU."""

    role: Role
    run_dir: str


@dataclass(frozen=True)
class Tenancy:
    """Of one daemon on one GPU. `neighbours` were there before it."""

    neighbours: list[Neighbour]
    _place: Path | None = None  # begin of the names of this GPU's files; None: nobody is seen

    @contextlib.contextmanager
    def alone(self, limit_s: float, must_stop: Callable[[], object], say: Callable[[], object]) -> Iterator[None]:
        """While it lasts no other daemon on the GPU is in here.

        Args:
            must_stop: ends the waiting if it says so; then it is entered all the same. It may raise.
            say: is called once if there is something to wait for.

        Raises:
            StalledError: another daemon is in here for `limit_s`.
        """
        deadline, has_said = time.monotonic() + limit_s, False
        with contextlib.ExitStack() as held:
            while not self.try_alone("memory", held) and not must_stop():
                if not has_said:
                    has_said = True
                    say()
                if time.monotonic() > deadline:
                    raise StalledError(
                        "the other daemon on this GPU has not finished its start within pipeline.stall_timeout_s="
                        f"{limit_s:g} seconds; look at what it says"
                    )
                time.sleep(_PAUSE_S)
            yield

    def try_alone(self, what: str, held: contextlib.ExitStack) -> bool:
        """Whether no other daemon on the GPU does `what` until `held` ends. Does not wait."""
        return self._place is None or _try_lock(_file(self._place, what), held)


@contextlib.contextmanager
def tenancy(uuid: str, role: Role, run_dir: str) -> Iterator[Tenancy]:
    """While it lasts, others see this daemon on the GPU with this UUID. Of two with one role they see the first."""
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(common_folder("gpus", ROOT)) / uuid
        except OSError:
            yield Tenancy([])
            return
        with open(_file(place, "door"), "wb", opener=private) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            neighbours = [neighbour for other in ROLES if (neighbour := _holder(place, other)) is not None]
            note = _file(place, role)
            if _try_lock(note, stack):
                note.write_bytes(os.fsencode(run_dir)[:_LONGEST_NOTE])
        yield Tenancy(neighbours, place)


def _holder(place: Path, role: Role) -> Neighbour | None:
    file = _file(place, role)
    with contextlib.ExitStack() as tried:
        if _try_lock(file, tried):
            return None
        return Neighbour(role, os.fsdecode(file.read_bytes()[:_LONGEST_NOTE]))


def _file(place: Path, what: str) -> Path:
    return place.with_name(f"{place.name}.{what}")


def _try_lock(file: Path, held: contextlib.ExitStack) -> bool:
    """Whether the lock of the file is this process's now, until `held` ends."""
    lock = private(str(file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    held.callback(_unlock, lock)
    return True


def _unlock(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a child process may have inherited the descriptor
    os.close(lock)
