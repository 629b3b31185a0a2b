"""A producer that has work and makes no progress ends, and says who waits for what."""

from dataclasses import replace
from typing import Any

import pytest

from producer.app.watchdog import Watchdog, describe
from producer.metrics import Counters, Delivery, Situation, Workload
from protocol.errors import ExitCode, StalledError

DELIVERY = Delivery(connected=True, heard_ago_s=0.42, held=7, unacked=2, unacked_bytes=3000, full=False)
SITUATION = Situation(Counters(policy_version=1), Workload((3, 3, 4, 1), 1, 2, 60.0), DELIVERY, 5, 4, 3)


def delivering(**delivery: Any) -> Situation:
    return replace(SITUATION, delivery=replace(DELIVERY, **delivery))


def counting(**counts: Any) -> Situation:
    return replace(SITUATION, counters=replace(SITUATION.counters, **counts))


def raises_first_at(end: float, *looks: tuple[float, Situation]) -> StalledError:
    watchdog = Watchdog(30.0)
    for now, situation in looks:
        watchdog.check(now, situation)
    watchdog.check(end - 0.1, looks[-1][1])
    with pytest.raises(StalledError) as said:
        watchdog.check(end, looks[-1][1])
    return said.value


def test_it_raises_at_its_limit_and_not_before(caplog):
    error = raises_first_at(130.0, (100.0, SITUATION), (101.0, SITUATION))
    assert str(error).startswith("no progress for pipeline.stall_timeout_s=30 seconds with 7 leases in hand")
    assert error.exit_code == ExitCode.STALLED == 75
    assert "\n  leases waiting for policy v3 (v1 is loaded): 2\n" in str(error)
    assert "in raises_first_at" in caplog.text, "where the threads stand"


@pytest.mark.parametrize("counter", ["groups", "failed", "settled", "swaps", "failed_swaps"])
def test_all_progress_starts_the_time_anew(counter):
    raises_first_at(159.0, (100.0, SITUATION), (129.0, counting(**{counter: 1})))


def test_tokens_and_lost_or_overdue_leases_are_no_progress():
    raises_first_at(130.0, (100.0, SITUATION), (129.0, counting(tokens=9, abandoned=9, failed=9, timed_out=9)))


WITH_AGENTS = replace(SITUATION, workload=Workload((), 7, 0, 0.0, with_agents=7))


@pytest.mark.parametrize("idle", [delivering(connected=False), delivering(held=0, unacked=0), WITH_AGENTS])
def test_waiting_for_a_trainer_or_for_leases_is_no_stall(idle):
    raises_first_at(1030.0, (100.0, SITUATION), (129.0, idle), (1000.0, idle), (1029.8, SITUATION))


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
    lines = describe(replace(delivering(full=True), counters=Counters()))
    assert lines[0] == "leases waiting for policy v1 (none is loaded): 1"
    assert lines[3] == "leases waiting for acknowledgements: 0"
    assert lines[6] == (
        "groups waiting for the trainer's acknowledgement: 2 "
        "(3000 bytes, above transport.max_unacked_bytes: generation is paused until then)"
    )
