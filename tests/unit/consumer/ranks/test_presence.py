"""Who counts as lost, with a scripted clock and a store that is a dictionary."""

import threading
from collections.abc import Callable

import pytest

from consumer.ranks.presence import Heartbeats, RankWatch, tell_lost
from protocol.errors import DeviceError, RankLostError

from .dictionary_store import DictionaryStore

GLOO_ERROR = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:24787: Connection reset by peer.")


@pytest.fixture(autouse=True)
def _may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that is not closed in time ends this process."""
    monkeypatch.setattr("consumer.ranks.presence._GRACE_S", 60.0)


class Looking:
    """A watch over rank 1 of host 0 and ranks 2 and 3 of host 1 that looks every quarter of a second."""

    def __init__(self, ended: Callable[[], list[tuple[int, str]]] = list, silence_s: float = 6.0) -> None:
        self.store = DictionaryStore()
        self.signs = {who: Heartbeats(self.store, who) for who in ("rank 1", "rank 2", "rank 3", "node 1")}
        self.signs["node 1"].send()  # before it is told its place
        self.watch = RankWatch(self.store, [range(2), range(2, 4)], silence_s, ended, [])
        self.now = self.watch._looked

    def after(self, seconds: float, without: tuple[str, ...] = ()) -> str | None:
        """What was found within so many seconds, in which all but these gave signs."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for who in self.signs.keys() - without:
                self.signs[who].send()
            if (found := self.watch.look(self.now)) is not None:
                return found
        return None


def test_a_rank_that_stands_still_is_named() -> None:
    ranks = Looking()
    assert ranks.after(10) is None
    assert ranks.after(5.5, without=("rank 3",)) is None
    said = ranks.after(1, without=("rank 3",))
    assert said == "rank 3 of node 1 gave no sign of life for 6 s: it is stopped, or its host is gone"


def test_how_long_silence_may_last_is_for_the_caller_to_say() -> None:
    ranks = Looking(silence_s=60.0)
    assert ranks.after(1) is None
    assert ranks.after(58, without=("rank 3",)) is None
    assert ranks.after(3, without=("rank 3",)) is not None


def test_one_that_still_loads_is_waited_for_but_not_for_ever() -> None:
    ranks = Looking()
    assert ranks.after(299, without=("rank 1",)) is None
    assert ranks.after(2, without=("rank 1",)) == "rank 1 gave no sign of life within 300 s of its start"


def test_a_host_that_is_gone_before_its_ranks_gave_a_sign_is_named_as_soon_as_any() -> None:
    ranks, gone = Looking(), ("node 1", "rank 2", "rank 3")
    assert ranks.after(5.5, without=gone) is None
    said = ranks.after(1.25, without=gone)
    assert said == "node 1 (ranks 2 to 3) gave no sign of life for 6 s: it is stopped, or its host is gone"


@pytest.mark.parametrize(
    ("who", "name"), [("node 1", "node 1 (ranks 2 to 3)"), ("rank 1", "rank 1"), ("rank 2", "rank 2 of node 1")]
)
def test_one_that_was_started_again_is_not_the_one_before(who: str, name: str) -> None:
    ranks = Looking()
    assert ranks.after(1) is None
    ranks.signs[who] = Heartbeats(ranks.store, who)
    assert ranks.after(0.25) == f"{name} ended, and was started again"


def test_the_time_in_which_rank_0_stood_still_does_not_count() -> None:
    ranks = Looking()
    assert ranks.after(1) is None
    ranks.now += 100.0
    assert ranks.after(5, without=("rank 1", "rank 2", "rank 3", "node 1")) is None
    assert ranks.after(2, without=("rank 2", "rank 3", "node 1")) is not None


def test_a_process_that_ended_is_named_at_once() -> None:
    ended: list[tuple[int, str]] = []
    ranks = Looking(lambda: ended)
    assert ranks.after(1) is None
    ended.append((1, "killed by SIGKILL"))
    assert ranks.after(0.25) == "rank 1 ended (killed by SIGKILL)"


def test_what_a_rank_said_or_its_host_saw_comes_before_the_end_of_others() -> None:
    ranks = Looking(lambda: [(1, "exit status 70")])
    tell_lost(ranks.store, 2, "OutOfMemoryError: CUDA out of memory")
    tell_lost(ranks.store, 1, "exit status 70")
    assert ranks.after(0.25) == "rank 2 ended (OutOfMemoryError: CUDA out of memory)"


def test_everybody_is_told_once_and_what_fails_then_is_explained() -> None:
    told: list[RankLostError] = []
    ended = threading.Event()
    dead = [(1, "killed by SIGKILL")]
    watch = RankWatch(DictionaryStore(), [range(2)], 6.0, lambda: dead if ended.is_set() else [], [told.append])
    watch.start()
    try:
        ended.set()
        with pytest.raises(RankLostError, match=r"rank 1 ended \(killed by SIGKILL\); go on with --resume"):
            watch.explain(GLOO_ERROR)
    finally:
        watch.close()
    assert [str(error) for error in told] == [str(watch.lost)]


def test_connections_that_break_while_all_are_there_end_the_run_as_a_lost_rank_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("consumer.ranks.presence._FINDING_S", 0.01 - 6.0)
    told: list[RankLostError] = []
    watch = RankWatch(DictionaryStore(), [range(2)], 6.0, list, [told.append])
    watch.start()
    with pytest.raises(RankLostError, match=r"the connection between the ranks broke .*Connection reset by peer"):
        watch.explain(GLOO_ERROR)
    assert len(told) == 1


def test_an_error_that_no_rank_caused_stays_what_it_is() -> None:
    watch = RankWatch(DictionaryStore(), [range(2)], 6.0, list, [])
    watch.explain(MemoryError())
    watch.explain(RuntimeError("CUDA out of memory"))
    assert watch.lost is None


def test_what_rank_0_has_to_say_itself_comes_before_a_rank_that_found_the_same() -> None:
    watch = RankWatch(DictionaryStore(), [range(2)], 6.0, lambda: [(1, "DeviceError: no memory")], [])
    watch.start()
    try:
        assert watch._found.wait(10)
        watch.explain(DeviceError("no memory for the model"))  # which the caller raises on
        with pytest.raises(RankLostError):
            watch.explain(RuntimeError("CUDA error: unspecified launch failure"))
    finally:
        watch.close()


def test_a_store_that_fails_ends_the_run_because_nobody_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")

    told: list[RankLostError] = []
    store = DictionaryStore()
    watch = RankWatch(store, [range(2)], 6.0, list, [told.append, lambda _: watch._closed.set()])
    monkeypatch.setattr(store, "check", fails)
    watch.start()
    watch.join(10)
    assert watch.lost is told[0]
    assert "the store of the ranks failed: Broken pipe" in str(watch.lost)
