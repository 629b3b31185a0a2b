"""What the process of another rank or host says of itself, while it lives and when it fails.

Guarantee: a process that took the place of one before it is told apart from that. A rank that fails says why before its
connections close, and one that merely lost the connection to another leaves rank 0 the time to find out which that was; so the
first that is heard is the cause.
"""

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from protocol.errors import ExitCode

logger = logging.getLogger(__name__)

LOST = "lost"
"""Key of the store: the first rank that was seen to end or fail, and how."""
_SILENCE_S, _SILENCE_OF_HOSTS_S = 6.0, 60.0
_GIVE_EVERY_S = 0.5
_MARGIN_S = 1.0
_MOST_CHARS = 500


def silence_s(chosen: float | None, num_hosts: int) -> float:
    """Return the seconds without a sign after which a process counts as lost. Between hosts a switch may fail over meanwhile.

    Args:
        chosen: `pipeline.rank_silence_s`.
    """
    return chosen or (_SILENCE_S if num_hosts == 1 else _SILENCE_OF_HOSTS_S)


class Signs:
    """Of one process.

    Args:
        who: "rank 3", "node 1".
    """

    def __init__(self, store: dist.Store, who: str) -> None:
        self._store = store
        self._key = key_of(who)
        self._life = secrets.token_hex(4)
        self._count = itertools.count()

    def give(self) -> None:
        self._store.set(self._key, f"{self._life} {next(self._count)}")


def key_of(who: str) -> str:
    return f"alive/{who}"


def same_life(sign: str, other: str) -> bool:
    """Whether one process gave both."""
    return sign.split()[0] == other.split()[0]


class SignsOfLife(threading.Thread):
    """Of a rank but the first, from a thread. Ends the process when rank 0 is gone."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__(name="signs-of-life", daemon=True)
        self._signs = Signs(store, f"rank {rank}")

    def run(self) -> None:
        while True:
            try:
                self._signs.give()
            except Exception:  # the store's own, which derives from RuntimeError or not, by release
                os._exit(ExitCode.RANK_LOST)
            time.sleep(_GIVE_EVERY_S)


def tell_lost(store: dist.Store, rank: int, how: str) -> None:
    """Has rank 0 end the run, unless it has heard of another rank before."""
    store.compare_set(LOST, "", f"rank {rank} ended ({how})")


@contextlib.contextmanager
def last_words(store: dist.Store, rank: int, silence_s: float) -> Iterator[None]:
    """Log an exception of a rank but the first, tell it to rank 0, and end this process.

    Args:
        silence_s: after which rank 0 knows which process is silent.
    """
    try:
        yield
    except Exception as error:
        if is_broken_connection(error):  # rank 0 names whom it leads to, and ends this process too
            time.sleep(silence_s + _MARGIN_S)
        logger.critical("this rank ends", exc_info=True)
        said = " ".join(str(error).split())[:_MOST_CHARS]
        tell_lost(store, rank, f"{type(error).__name__}: {said}" if said else type(error).__name__)
        os._exit(ExitCode.BUG)


def is_broken_connection(error: Exception) -> bool:
    """Whether a collective operation raised this because another rank is gone. Gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
