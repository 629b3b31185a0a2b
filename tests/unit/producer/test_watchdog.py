"""A producer that has work and makes no progress ends, and says who waits for what."""

import dataclasses

import pytest

from producer.state import Counters, Delivery, Situation, Workload
from producer.watchdog import Watchdog, describe
from protocol.errors import ExitCode, StalledError

DELIVERY = Delivery(connected=True, heard_ago_s=0.42, held=7, unacked=2, unacked_bytes=3000, full=False)
SITUATION = Situation(Workload((3, 3, 4, 1), 1, 2, 60.0), DELIVERY, policy_version=1, num_workers=4, num_idle_workers=3)


def changed(**delivery: object) -> Situation:
    return dataclasses.replace(SITUATION, delivery=dataclasses.replace(DELIVERY, **delivery))


def test_it_raises_at_its_limit_and_not_before():
    watchdog, counters = Watchdog(30.0), Counters()
    for now in (100.0, 101.0, 129.9):
        watchdog.check(now, counters, SITUATION)
    with pytest.raises(
        StalledError, match=r"no progress for pipeline\.stall_timeout_s=30 seconds with 7 leases"
    ) as said:
        watchdog.check(130.0, counters, SITUATION)
    assert said.value.exit_code == ExitCode.STALLED == 75
    assert "\n  leases waiting for policy v3 (v1 is loaded): 2\n" in str(said.value)


@pytest.mark.parametrize("counter", ["groups", "failed", "settled", "swaps", "failed_swaps"])
def test_all_progress_starts_the_time_anew(counter):
    watchdog, counters = Watchdog(30.0), Counters()
    watchdog.check(100.0, counters, SITUATION)
    setattr(counters, counter, 1)
    watchdog.check(129.0, counters, SITUATION)
    watchdog.check(158.9, counters, SITUATION)
    with pytest.raises(StalledError):
        watchdog.check(159.0, counters, SITUATION)


def test_tokens_and_lost_or_overdue_leases_are_no_progress():
    watchdog, counters = Watchdog(30.0), Counters()
    watchdog.check(100.0, counters, SITUATION)
    counters.tokens = counters.abandoned = counters.failed = counters.timed_out = 9
    with pytest.raises(StalledError):
        watchdog.check(130.0, counters, SITUATION)


WITH_AGENTS = Situation(Workload((), 7, 0, 0.0, with_agents=7), DELIVERY, 1, 1, 1)


@pytest.mark.parametrize("idle", [changed(connected=False), changed(held=0, unacked=0), WITH_AGENTS])
def test_waiting_for_a_trainer_or_for_leases_is_no_stall(idle):
    watchdog, counters = Watchdog(30.0), Counters()
    watchdog.check(100.0, counters, SITUATION)
    watchdog.check(129.0, counters, idle)
    watchdog.check(1000.0, counters, idle)
    watchdog.check(1029.9, counters, SITUATION)
    with pytest.raises(StalledError):
        watchdog.check(1030.0, counters, SITUATION)


def test_the_dump_names_everything_that_can_be_waited_for():
    assert describe(SITUATION) == [
        "leases waiting for policy v3 (v1 is loaded): 2",
        "leases waiting for policy v4 (v1 is loaded): 1",
        "leases waiting for room in the engine: 1",
        "leases generating: 1",
        "leases being scored: 2 (reward workers: 1 busy, 3 idle)",
        "groups waiting for the trainer's acknowledgement: 2 (3000 bytes)",
        "the trainer was last heard 0.4 s ago",
    ]


def test_the_dump_names_a_full_outbox_and_a_missing_policy():
    lines = describe(dataclasses.replace(changed(full=True), policy_version=-1))
    assert lines[0] == "leases waiting for policy v1 (none is loaded): 1"
    assert lines[3] == "leases waiting for acknowledgements: 0"
    assert lines[6] == (
        "groups waiting for the trainer's acknowledgement: 2 "
        "(3000 bytes, above transport.max_unacked_bytes: generation is paused until then)"
    )
