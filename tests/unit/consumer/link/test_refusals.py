"""When a run ends because no producer serves its policies, and when it waits."""

import pytest

from consumer.link.refusals import RefusalWatch
from consumer.link.sessions import ProducerSession
from protocol.errors import ExitCode, PolicyRefusedError
from protocol.wire.messages import Heartbeat
from tests.unit.consumer.builders import Clock


class Watched:
    """A watch that allows three refusals and lets producers come back for 5 s, and the producers that it sees."""

    def __init__(self, *, is_resumed: bool = False) -> None:
        self.clock = Clock()
        self.watch = RefusalWatch(3, 5.0, is_resumed, self.clock.monotonic)
        self.sessions: dict[str, ProducerSession] = {}
        self.newest = 0

    def serves(self, name: str, version: int, *, refused: int = -1, in_a_row: int = 0) -> None:
        beat = Heartbeat(
            version,
            8,
            [],
            0,
            0.0,
            refused_version=refused,
            refusal=f"{name} says no" * (refused >= 0),
            num_refused=in_a_row,
        )
        self.newest = max(self.newest, version, refused)
        self.sessions[name] = ProducerSession(name, 8, 0.0, heartbeat=beat)
        self.watch.note(beat, self.newest)

    def check(self, oldest_usable: int | None = None) -> None:
        self.watch.check(list(self.sessions.values()), self.newest, oldest_usable)

    def ends(self, oldest_usable: int | None = None, after_s: float = 5.0) -> str:
        """What ends the run, `after_s` after it was first to be seen and not before."""
        if after_s:
            self.check(oldest_usable)
            self.clock.now += after_s - 0.1
            self.check(oldest_usable)
            self.clock.now += 0.2
        with pytest.raises(PolicyRefusedError) as ended:
            self.check(oldest_usable)
        assert ended.value.exit_code == ExitCode.POLICY_REFUSED == 81
        return str(ended.value)

    def goes_on(self, oldest_usable: int | None = None) -> None:
        for _ in range(2):
            self.check(oldest_usable)
            self.clock.now += 100.0
        self.check(oldest_usable)


def test_a_run_whose_first_policy_is_refused_ends_at_once_with_reason_and_fix() -> None:
    watched = Watched()
    watched.goes_on(oldest_usable=-1)
    watched.serves("p", -1, refused=0, in_a_row=1)
    assert watched.ends(oldest_usable=-1, after_s=0.0) == (
        "every producer refuses the policy, and none serves any version: p, which serves none, refuses v0: p says no. Repair "
        "what the reason names (docs/alerts.md, SwapRefused) and start the producer again, then the trainer with --resume: "
        "what was trained is kept"
    )


def test_later_refusals_end_it_at_their_bound_after_a_moment_in_which_others_may_come_back() -> None:
    watched = Watched()
    watched.serves("p", 4)
    for count in (1, 2):
        watched.serves("p", 4, refused=4 + count, in_a_row=count)
        watched.goes_on()
        watched.goes_on(oldest_usable=4)
    watched.serves("p", 4, refused=7, in_a_row=3)
    assert "3 versions in a row (swap.max_refused): p, which serves v4, refuses v7: p says no" in watched.ends()


def test_it_ends_before_the_bound_when_groups_of_what_is_served_cannot_be_trained() -> None:
    watched = Watched()
    watched.serves("p", 4)
    watched.serves("p", 4, refused=5, in_a_row=1)
    watched.goes_on(oldest_usable=None)
    watched.newest = 6
    watched.goes_on(oldest_usable=5)  # v6 is not judged yet
    watched.serves("p", 4, refused=6, in_a_row=2)
    assert "groups of v4 are too old to be trained (pipeline.max_staleness)" in watched.ends(oldest_usable=5)


def test_a_success_in_between_begins_the_count_anew() -> None:
    watched = Watched()
    watched.serves("p", 4)
    watched.serves("p", 4, refused=7, in_a_row=3)
    watched.check()
    watched.clock.now += 4.0
    watched.serves("p", 8)
    watched.goes_on(oldest_usable=8)
    watched.serves("p", 8, refused=10, in_a_row=2)
    watched.goes_on()
    watched.serves("p", 8, refused=11, in_a_row=3)
    watched.ends()


def test_what_one_producer_refuses_and_another_serves_or_tries_ends_nothing() -> None:
    watched = Watched()
    watched.serves("bad", -1, refused=0, in_a_row=1)
    watched.serves("new", -1)
    watched.goes_on(oldest_usable=0)
    watched.serves("new", 0)
    watched.serves("bad", -1, refused=3, in_a_row=4)
    watched.serves("new", 3)
    watched.goes_on(oldest_usable=3)
    watched.serves("new", 3, refused=4, in_a_row=0)  # for a reason that may pass
    watched.serves("bad", -1, refused=4, in_a_row=5)
    watched.goes_on(oldest_usable=4)
    del watched.sessions["new"]
    watched.goes_on(oldest_usable=4)  # it refused what another served, so it proves nothing now that it is alone
    del watched.sessions["bad"]
    watched.goes_on(oldest_usable=4)


def test_two_that_refuse_the_same_versions_end_it_when_the_slower_one_has_refused_enough() -> None:
    watched = Watched()
    watched.serves("fast", 2)
    watched.serves("slow", 1)
    watched.serves("fast", 2, refused=6, in_a_row=4)
    watched.serves("slow", 2, refused=6, in_a_row=2)
    watched.goes_on()
    watched.serves("slow", 2, refused=7, in_a_row=3)
    told = watched.ends()
    assert "fast, which serves v2, refuses v6: fast says no; slow, which serves v2, refuses v7: slow says no" in told


def test_a_resumed_trainer_waits_for_the_producers_of_the_one_before() -> None:
    watched = Watched(is_resumed=True)
    watched.watch.note(Heartbeat(12, 8, [], 0, 0.0), newest=9)
    assert watched.watch.served == -1, "v12 of the trainer before is not this one's"
    watched.serves("p", -1, refused=9, in_a_row=1)
    watched.check(oldest_usable=8)
    watched.clock.now += 4.0
    watched.serves("other", 9)
    watched.goes_on(oldest_usable=8)

    watched = Watched(is_resumed=True)
    watched.serves("p", -1, refused=9, in_a_row=1)
    assert "none serves any version" in watched.ends(oldest_usable=8)


def test_the_message_names_some_of_many_producers() -> None:
    watched = Watched()
    for number in range(6):
        watched.serves(f"p{number}", -1, refused=0, in_a_row=1)
    told = watched.ends(oldest_usable=0, after_s=0.0)
    assert "p3 says no; and 2 more producers. Repair" in told
    assert "p4" not in told
