"""Every group offered gets one outcome, every prompt one fate, and the counts add up."""

import random
import threading
import time

import pytest

from protocol.errors import DataFailuresError
from replay.buffer import FAILURE_WINDOW, RolloutBuffer
from replay.ledger import UnknownLeaseError

from .builders import buffer, group


def lease(replay: RolloutBuffer, producer: str = "p", *, now: float = 0.0, timeout_s: float = 60.0) -> str:
    record = replay.lease(producer, now=now, timeout_s=timeout_s)
    assert record is not None
    return record.lease_id


def fill(replay: RolloutBuffer, version: int, count: int = 2) -> None:
    for _ in range(count):
        assert replay.offer(group(lease(replay), version)) == "accepted"


def names(groups: list) -> list[str]:
    return [g.group_id for g in groups]


def test_nothing_is_leased_before_the_first_policy_is_published() -> None:
    replay = buffer()
    replay.published(-1)
    assert replay.lease("p", now=0.0, timeout_s=1.0) is None
    replay.published(0)
    assert lease(replay) == "s-1"


@pytest.mark.parametrize(("max_staleness", "leases"), [(0, 2), (1, 4), (3, 8)])
def test_leases_end_with_the_staleness_budget_and_come_back_with_the_next_version(
    max_staleness: int, leases: int
) -> None:
    replay = buffer(max_staleness=max_staleness)
    given = [lease(replay) for _ in range(leases)]
    assert replay.lease("p", now=0.0, timeout_s=1.0) is None
    for lease_id in given[:2]:
        replay.offer(group(lease_id))
    assert replay.lease("p", now=0.0, timeout_s=1.0) is None, "what is ready counts too"
    assert replay.next_batch(0.0) is not None
    replay.published(1)
    assert [lease(replay), lease(replay)]
    assert replay.lease("p", now=0.0, timeout_s=1.0) is None


def test_a_batch_holds_the_first_groups_and_everything_that_arrived() -> None:
    replay = buffer(max_staleness=2)
    first, dull, second, third = (lease(replay) for _ in range(4))
    assert replay.offer(group(first)) == "accepted"
    assert replay.next_batch(0.0) is None
    assert replay.offer(group(dull, signal=False)) == "no_signal"
    assert replay.offer(group(third)) == "accepted"
    batch = replay.next_batch(0.0)
    assert batch is not None
    assert batch.step == 0
    assert names(batch.groups) == [first, third]
    assert [(g.group_id, outcome) for g, outcome in batch.arrivals] == [
        (first, "accepted"),
        (dull, "no_signal"),
        (third, "accepted"),
    ]
    replay.published(1)
    replay.offer(group(second))
    fill(replay, 1, count=1)
    following = replay.next_batch(0.0)
    assert following is not None
    assert following.step == 1
    assert len(following.arrivals) == 2


def test_a_batch_trained_twice_moves_the_step_by_two() -> None:
    replay = buffer(num_iterations=2)
    fill(replay, 0)
    first = replay.next_batch(0.0)
    replay.published(2)
    fill(replay, 2)
    second = replay.next_batch(0.0)
    assert (first.step, second.step) == (0, 2)


def test_a_group_without_signal_settles_its_prompt() -> None:
    replay = buffer(num_prompts=2)
    assert replay.offer(group(lease(replay), signal=False)) == "no_signal"
    assert replay.state()["ledger"]["unsettled"] == []
    assert replay.depth() == {"ready": 0, "leased": 0, "epoch": 0}


def test_a_second_result_is_a_duplicate_and_is_not_counted_as_an_arrival() -> None:
    replay = buffer(num_prompts=1, groups_per_step=1)
    late = lease(replay, timeout_s=1.0)
    assert [record.lease_id for record in replay.expire(1.0)] == [late]
    again = lease(replay, now=1.0)
    assert replay.offer(group(again)) == "accepted"
    assert replay.offer(group(late)) == "duplicate"
    assert replay.offer(group(again)) == "duplicate"
    batch = replay.next_batch(0.0)
    assert names(batch.groups) == [again]
    assert len(batch.arrivals) == 1
    assert replay.offer(group(again)) == "duplicate"


def test_a_group_that_is_too_old_on_arrival_sends_its_prompt_out_again() -> None:
    replay = buffer(groups_per_step=1, max_staleness=1)
    slow = lease(replay)
    for version in (0, 1):
        fill(replay, version, count=1)
        assert replay.next_batch(0.0) is not None
        replay.published(version + 1)
    assert replay.offer(group(slow, version=0)) == "stale"
    assert replay.offer(group(slow, version=0)) == "duplicate"
    record = replay.lease("p", now=0.0, timeout_s=1.0)
    assert (record.item.prompt_id, record.item.attempt, record.policy_floor) == (0, 2, 1)
    assert replay.counts["stale"] == 1


def test_a_group_that_grows_too_old_in_the_table_is_requeued() -> None:
    replay = buffer(num_prompts=10, max_staleness=1)
    ids = [lease(replay) for _ in range(4)]
    for lease_id in ids[:3]:  # the fourth is slow, so the third waits
        replay.offer(group(lease_id, 0))
    assert names(replay.next_batch(0.0).groups) == ids[:2]
    replay.published(2)  # two steps' worth of versions pass, as after a resume from a later checkpoint
    replay._next_step = 2
    assert replay.next_batch(0.0) is None
    assert replay.counts["went_stale"] == 1
    assert replay.depth()["ready"] == 0
    record = replay.lease("p", now=0.0, timeout_s=1.0)
    assert record.item.prompt_id == 2
    assert record.item.attempt == 2


def test_an_unknown_lease_is_no_outcome() -> None:
    replay = buffer()
    with pytest.raises(UnknownLeaseError):
        replay.offer(group("other-1"))
    with pytest.raises(UnknownLeaseError):
        replay.fail("other-1", "reward_failed", "")
    assert replay.counts["accepted"] == replay.counts["failed_reward_failed"] == 0


def test_failures_are_counted_by_reason_and_prompts_skipped_after_max_attempts() -> None:
    replay = buffer(num_prompts=3, max_attempts=2)
    assert replay.fail(lease(replay), "reward_failed", "boom") is True
    assert replay.fail(lease(replay), "reward_failed", "boom") is False
    assert replay.fail(lease(replay), "prompt_too_long", "900 tokens") is False
    assert replay.fail(lease(replay), "returned", "") is True
    assert replay.counts == {
        "leased": 4,
        "failed_reward_failed": 2,
        "failed_prompt_too_long": 1,
        "prompts_skipped": 2,
        "returned": 1,
    }


def answer(replay: RolloutBuffer, *, failures: int, successes: int) -> None:
    for _ in range(failures):
        replay.fail(lease(replay), "reward_failed", "ZeroDivisionError: division by zero")
    for _ in range(successes):
        replay.offer(group(lease(replay), signal=False))


def test_the_run_stops_at_exactly_the_share_of_failures_that_is_not_allowed() -> None:
    assert FAILURE_WINDOW == 64
    replay = buffer()
    answer(replay, failures=32, successes=32)  # half of the window: just allowed
    assert replay.next_batch(0.0) is None
    answer(replay, failures=32, successes=0)  # drives the first failures out of the window, so still half
    assert replay.next_batch(0.0) is None
    answer(replay, failures=1, successes=0)  # drives a success out
    with pytest.raises(DataFailuresError) as caught:
        replay.next_batch(0.0)
    assert str(caught.value) == (
        "33 of the last 64 answers of producers were failures, more than pipeline.max_failed_share=0.5 allows. "
        "The last one: reward_failed: ZeroDivisionError: division by zero"
    )
    assert caught.value.exit_code == 66


def test_one_failure_above_the_share_is_enough() -> None:
    replay = buffer()
    answer(replay, failures=0, successes=31)
    answer(replay, failures=33, successes=0)
    with pytest.raises(DataFailuresError, match="33 of the last 64"):
        replay.next_batch(0.0)


def test_a_short_history_of_failures_is_not_judged_and_good_answers_clear_it() -> None:
    replay = buffer()
    answer(replay, failures=63, successes=0)
    assert replay.next_batch(0.0) is None
    answer(replay, failures=0, successes=33)
    assert replay.next_batch(0.0) is None


def test_returned_leases_and_moot_failures_are_not_failures() -> None:
    replay = buffer()
    for _ in range(100):
        replay.fail(lease(replay), "returned", "shutting down")
        late = lease(replay, timeout_s=1.0)
        replay.expire(1.0)
        replay.fail(late, "reward_failed", "too late to matter")
    assert replay.next_batch(0.0) is None


def test_a_failure_wakes_a_trainer_that_waits() -> None:
    replay = buffer()
    answer(replay, failures=63, successes=0)
    timer = threading.Timer(0.05, lambda: answer(replay, failures=1, successes=0))
    timer.start()
    began = time.monotonic()
    with pytest.raises(DataFailuresError):
        replay.next_batch(30.0)
    assert time.monotonic() - began < 10
    timer.join()


def test_next_batch_waits_no_longer_than_told() -> None:
    began = time.monotonic()
    assert buffer().next_batch(0.1) is None
    assert 0.09 < time.monotonic() - began < 5


def test_a_restored_buffer_trains_what_was_not_trained() -> None:
    replay = buffer(num_prompts=5, max_staleness=1)
    fill(replay, 0, count=3)
    lease(replay)
    replay.next_batch(0.0)
    state = replay.state()

    restored = buffer(num_prompts=5, max_staleness=1)
    restored.restore(state, step=1)
    restored.published(1)
    assert restored.depth() == {"ready": 0, "leased": 0, "epoch": 0}
    prompts = [restored.lease("p", now=0.0, timeout_s=1.0).item.prompt_id for _ in range(3)]
    assert sorted(prompts) == [2, 3, 4]
    assert restored.counts["trained"] == 2
    assert restored.counts["leased"] == 4 + 3


def test_two_threads_lose_nothing() -> None:
    """Producers answer, lose, repeat and fail leases at random while the trainer cuts and publishes."""
    replay = buffer(num_prompts=40, groups_per_step=3, max_staleness=1, max_failed_share=1.0, max_attempts=1_000_000)
    published = 0
    done = threading.Event()
    errors: list[BaseException] = []

    def producers() -> None:
        draw = random.Random(0)
        out: list[str] = []
        ended: list[str] = []
        now = 0.0
        try:
            while not done.is_set():
                now += 0.01
                record = replay.lease(draw.choice("ab"), now=now, timeout_s=0.3)
                if record is not None:
                    out.append(record.lease_id)
                replay.expire(now)
                if draw.random() < 0.02:
                    replay.release("a")
                if not out:
                    continue
                lease_id = out.pop(draw.randrange(len(out)))
                ended.append(lease_id)
                kind = draw.random()
                if kind < 0.7:
                    replay.offer(group(lease_id, published, signal=draw.random() < 0.8))
                elif kind < 0.8:
                    replay.fail(lease_id, "generation_failed", "")
                elif kind < 0.9:
                    replay.fail(lease_id, "returned", "")
                if draw.random() < 0.1:
                    assert replay.offer(group(draw.choice(ended[-50:]), published)) in (
                        "duplicate",
                        "accepted",
                        "stale",
                    )
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=producers)
    thread.start()
    trained = []
    deadline = time.monotonic() + 30
    while len(trained) < 900 and time.monotonic() < deadline and not errors:
        batch = replay.next_batch(0.2)
        if batch is not None:
            assert all(published - g.policy_version <= 1 for g in batch.groups)
            trained += names(batch.groups)
            published += 1
            replay.published(published)
    done.set()
    thread.join()
    assert errors == []
    assert len(trained) == 900 == len(set(trained)), "a group was trained twice"
    counts, depth, unsettled = replay.counts, replay.depth(), replay.state()["ledger"]["unsettled"]
    assert counts["trained"] == 900
    assert counts["accepted"] == 900 + depth["ready"] + counts["went_stale"]
    epoch, position = replay.state()["ledger"]["epoch"], replay.state()["ledger"]["position"]
    assert epoch * 40 + position == 900 + counts["no_signal"] + len(unsettled), "a prompt was lost or settled twice"
