"""Who of the ranks is still there.

Guarantee: a rank whose process ended is noticed within a second, one that is stopped within `_SILENCE_S`; the run then ends, with
the rank named, also where the main thread waits in a collective operation for ever. A long pass is no silence, because the signs
of life come from a thread; and while rank 0 itself was stopped nobody counts as silent.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from consumer.ranks.rendezvous import LOST
from protocol.errors import ExitCode, RankLostError

logger = logging.getLogger(__name__)

_BEAT_EVERY_S = 0.5
_LOOK_EVERY_S = 0.25
_SILENCE_S = 6.0
_GRACE_S = 3.0  # for the main thread, to end in good order once the other ranks are gone


class SignsOfLife(threading.Thread):
    """Of a rank but the first. Ends the process when rank 0 is gone."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__(name="signs-of-life", daemon=True)
        self._store = store
        self._key = _key(rank)

    def run(self) -> None:
        count = 0
        while True:
            try:
                self._store.set(self._key, str(count))
            except Exception:  # the store's own, which derives from RuntimeError or not, by release
                os._exit(ExitCode.RANK_LOST)
            count += 1
            time.sleep(_BEAT_EVERY_S)


class RankWatch(threading.Thread):
    """Of rank 0.

    Args:
        ended: gives the ranks on this host whose processes have ended, and how.
        on_lost: is called once, on this thread, with what happened; it ends what is left of the ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        world: int,
        ended: Callable[[], Iterable[tuple[int, str]]],
        on_lost: Sequence[Callable[[RankLostError], None]],
    ) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self._store = store
        self._ended = ended
        self._on_lost = on_lost
        self._beats = dict.fromkeys(range(1, world), "")
        self._looked = time.monotonic()
        self._changed = dict.fromkeys(range(1, world), self._looked)
        self._closed = threading.Event()
        self._found = threading.Event()
        self.lost: RankLostError | None = None

    def check(self) -> None:
        """After an error that may come from a lost rank: raises `RankLostError` if it does."""
        self._found.wait(2 * _LOOK_EVERY_S + 1.0)
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        self._closed.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            why = self.look(time.monotonic())
            if why is None:
                continue
            self.lost = RankLostError(f"{why}; go on with --resume, which trains the step in progress again")
            for tell in self._on_lost:
                try:
                    tell(self.lost)
                except Exception:  # a disk that is full, say; the run ends all the same
                    logger.exception("a rank was lost, and this could not be noted")
            self._found.set()
            if not self._closed.wait(_GRACE_S):
                logger.critical("%s", self.lost)
                os._exit(ExitCode.RANK_LOST)
            return

    def look(self, now: float) -> str | None:
        """What happened to a rank, if anything. Is called at least every `_LOOK_EVERY_S` while this process runs; `now` is in
        seconds of the monotonic clock."""
        stood_still = max(0.0, now - self._looked - 2 * _LOOK_EVERY_S)  # this process, not the others
        self._looked = now
        for rank in self._changed:
            self._changed[rank] += stood_still
        for rank, how in self._ended():
            return f"rank {rank} ended ({how})"
        for rank in self._beats:
            if self._store.check([f"{LOST}/{rank}"]):
                return f"rank {rank} ended ({self._store.get(f'{LOST}/{rank}').decode()})"
            if self._store.check([_key(rank)]):
                beat = self._store.get(_key(rank)).decode()
                if beat != self._beats[rank]:
                    self._beats[rank], self._changed[rank] = beat, now
            if self._beats[rank] and now - self._changed[rank] > _SILENCE_S:
                return f"rank {rank} gave no sign of life for {_SILENCE_S:.0f} s: it is stopped, or its host is gone"
        return None


def _key(rank: int) -> str:
    return f"alive/{rank}"
