"""Signs of life of ranks and hosts, and the watch over them.

Guarantee: a rank whose process ended, or failed with a message, is noticed within a second; a rank or a host that is stopped or
gone within `silence_s`, also while models load; a rank that never begins to give signs within `_FIRST_SIGN_S`. The run then ends,
with the rank or host named, also where the main thread waits in a collective operation for ever. A long pass is no silence,
because the signs of life come from a thread; and while rank 0 itself was stopped no other process counts as silent.

A process that took the place of an earlier one is told apart from it. A rank that fails says why before its connections close,
and one that merely lost the connection to another leaves rank 0 the time to find out which that was; so the first report is the
cause.
"""

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from protocol.errors import ExitCode, RankLostError, SlipstreamError

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


class Heartbeats:
    """The heartbeats of a process.

    Args:
        who: "rank 3", "node 1".
    """

    def __init__(self, store: dist.Store, who: str) -> None:
        self._store = store
        self._key = key_of(who)
        self._life = secrets.token_hex(4)
        self._count = itertools.count()

    def send(self) -> None:
        self._store.set(self._key, f"{self._life} {next(self._count)}")


def key_of(who: str) -> str:
    return f"alive/{who}"


def same_life(sign: str, other: str) -> bool:
    """Return whether both heartbeats are of one process."""
    return sign.split()[0] == other.split()[0]


class HeartbeatThread(threading.Thread):
    """The thread of a rank other than 0 that sends its heartbeats. It ends the process when rank 0 is gone."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__(name="signs-of-life", daemon=True)
        self._signs = Heartbeats(store, f"rank {rank}")

    def run(self) -> None:
        while True:
            try:
                self._signs.send()
            except Exception:  # the store's own, which derives from RuntimeError or not, by release
                os._exit(ExitCode.RANK_LOST)
            time.sleep(_GIVE_EVERY_S)


def tell_lost(store: dist.Store, rank: int, how: str) -> None:
    """Report a lost rank to rank 0, which ends the run, unless another was reported before."""
    store.compare_set(LOST, "", f"rank {rank} ended ({how})")


@contextlib.contextmanager
def report_failure(store: dist.Store, rank: int, silence_s: float) -> Iterator[None]:
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
    """Return whether a collective operation raised this because another rank is gone. Gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


_LOOK_EVERY_S = 0.25
_FIRST_SIGN_S = 300.0  # a rank gives signs once its libraries are imported, which may take long on a network's disk
_GRACE_S = 2.0  # for the main thread, to end in good order once the other ranks are gone
_FINDING_S = 2.0  # beyond the silence of a process that is lost


@dataclass
class _Seen:
    """The last heartbeat of a rank or host."""

    name: str
    changed: float
    sign: str = ""


class RankWatch(threading.Thread):
    """The watch over the heartbeats of the other ranks and hosts. It runs on rank 0.

    Args:
        hosts: the ranks of each, by number of the host.
        silence_s: without a sign for so long a process counts as lost.
        ended: gives the ranks on this host whose processes have ended, and how.
        on_lost: is called once, on this thread, with what happened; it ends what is left of the ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        hosts: Sequence[range],
        silence_s: float,
        ended: Callable[[], Iterable[tuple[int, str]]],
        on_lost: Sequence[Callable[[RankLostError], None]],
    ) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self._store = store
        self._silence_s = silence_s
        self._ended = ended
        self._on_lost = on_lost
        self._looked = time.monotonic()
        self._seen = {key_of(who): _Seen(name, self._looked) for who, name in _watched(hosts)}
        for key in self._seen:
            store.compare_set(key, "", "")  # so that all can be read at once
        self._closed = threading.Event()
        self._found = threading.Event()
        self.lost: RankLostError | None = None

    def explain(self, error: Exception) -> None:
        """Raise `RankLostError` if a lost rank may have caused this error of the main thread. An error with a message for the
        user, such as that rank 0's own device has no memory, is not of that kind."""
        if isinstance(error, SlipstreamError):
            return
        if is_broken_connection(error) and not self._found.wait(self._silence_s + _FINDING_S):
            self.close()
            if self.lost is None:
                self._lose(f"the connection between the ranks broke ({error})")
        if self.lost is not None:
            raise self.lost from error

    def close(self) -> None:
        self._closed.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            try:
                why = self.look(time.monotonic())
            except Exception as error:  # the store's own, which derives from RuntimeError or not, by release
                why = f"the store of the ranks failed: {error}"
            if why is not None:
                self._lose(why)
                if not self._closed.wait(_GRACE_S):
                    logger.critical("%s", self.lost)
                    os._exit(ExitCode.RANK_LOST)
                return

    def look(self, now: float) -> str | None:
        """Return what happened to a rank or host, if anything. Call it at least every `_LOOK_EVERY_S` while this process runs.

        Args:
            now: seconds of the monotonic clock.
        """
        stood_still = max(0.0, now - self._looked - 2 * _LOOK_EVERY_S)  # this process, not the others
        self._looked = now
        if self._store.check([LOST]):
            return str(self._store.get(LOST).decode())
        for rank, how in self._ended():
            return f"rank {rank} ended ({how})"
        signs = self._store.multi_get(list(self._seen)) if self._seen else []
        for seen, sign in zip(self._seen.values(), map(bytes.decode, signs), strict=True):
            seen.changed += stood_still
            if sign != seen.sign:
                if seen.sign and not same_life(sign, seen.sign):
                    return f"{seen.name} ended, and was started again"
                seen.sign, seen.changed = sign, now
            elif not seen.sign and now - seen.changed > _FIRST_SIGN_S:
                return f"{seen.name} gave no sign of life within {_FIRST_SIGN_S:.0f} s of its start"
            elif seen.sign and now - seen.changed > self._silence_s:
                return (
                    f"{seen.name} gave no sign of life for {self._silence_s:.0f} s: it is stopped, or its host is gone"
                )
        return None

    def _lose(self, why: str) -> None:
        self.lost = RankLostError(f"{why}; go on with --resume, which trains the step in progress again")
        for tell in self._on_lost:
            try:
                tell(self.lost)
            except Exception:  # a disk that is full, say; the run ends all the same
                logger.exception("a rank was lost, and this could not be noted")
        self._found.set()


def _watched(hosts: Sequence[range]) -> Iterable[tuple[str, str]]:
    """Yield the processes that are watched, and their names in messages. Hosts come first: with one its ranks fall silent."""
    for node, ranks in enumerate(hosts[1:], 1):
        yield f"node {node}", f"node {node} (ranks {ranks[0]} to {ranks[-1]})"
    for node, ranks in enumerate(hosts):
        for rank in ranks[1:] if node == 0 else ranks:
            yield f"rank {rank}", f"rank {rank} of node {node}" if node else f"rank {rank}"
