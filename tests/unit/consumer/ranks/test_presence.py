"""Who counts as lost, with a scripted clock and a store that is a dictionary."""

import threading
from collections.abc import Callable

import pytest

from consumer.ranks.presence import RankWatch
from protocol.errors import RankLostError


class Store:
    """What this module uses of `torch.distributed.Store`."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def beat(self, rank: int, count: int) -> None:
        self.set(f"alive/{rank}", str(count))

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key].encode()


class Looking:
    """A watch over ranks 1 and 2 that looks every quarter of a second."""

    def __init__(self, ended: Callable[[], list[tuple[int, str]]] = list) -> None:
        self.store = Store()
        self.watch = RankWatch(self.store, 3, ended, [])
        self.now = self.watch._looked

    def after(self, seconds: float, beating: tuple[int, ...] = ()) -> str | None:
        """What was found within so many seconds."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for rank in beating:
                self.store.beat(rank, round(self.now * 2))
            if (found := self.watch.look(self.now)) is not None:
                return found
        return None


def test_a_rank_that_stands_still_is_named() -> None:
    ranks = Looking()
    assert ranks.after(10, beating=(1, 2)) is None
    assert ranks.after(5.5, beating=(1,)) is None
    said = ranks.after(1, beating=(1,))
    assert said == "rank 2 gave no sign of life for 6 s: it is stopped, or its host is gone"


def test_one_that_still_loads_is_waited_for() -> None:
    assert Looking().after(60, beating=(2,)) is None


def test_the_time_in_which_rank_0_stood_still_does_not_count() -> None:
    ranks = Looking()
    assert ranks.after(1, beating=(1, 2)) is None
    ranks.now += 100.0
    assert ranks.after(5, beating=()) is None
    assert ranks.after(2, beating=(1,)) is not None


def test_a_process_that_ended_is_named_at_once() -> None:
    ended: list[tuple[int, str]] = []
    ranks = Looking(lambda: ended)
    assert ranks.after(1, beating=(1, 2)) is None
    ended.append((2, "killed by SIGKILL"))
    assert ranks.after(0.25, beating=(1, 2)) == "rank 2 ended (killed by SIGKILL)"


def test_a_process_that_ended_on_another_host_is_named() -> None:
    ranks = Looking()
    assert ranks.after(1, beating=(1, 2)) is None
    ranks.store.set("lost/2", "exit status 1")
    assert ranks.after(0.25, beating=(1, 2)) == "rank 2 ended (exit status 1)"


def test_everybody_is_told_once_and_what_fails_then_is_explained() -> None:
    told: list[RankLostError] = []
    ended = threading.Event()
    watch = RankWatch(Store(), 2, lambda: [(1, "exit code 1")] if ended.is_set() else [], [told.append])
    watch.start()
    try:
        ended.set()
        with pytest.raises(RankLostError, match=r"rank 1 ended \(exit code 1\); go on with --resume"):
            watch.check()
    finally:
        watch.close()
    assert [str(error) for error in told] == [str(watch.lost)]


@pytest.mark.long
def test_an_error_that_no_rank_caused_stays_what_it_is() -> None:
    watch = RankWatch(Store(), 2, list, [])
    watch.start()
    try:
        watch.check()
    finally:
        watch.close()
    assert watch.lost is None
