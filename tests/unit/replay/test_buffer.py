"""Every offered group gets one answer, every prompt is settled once, and the counts add up."""

import contextlib
import random
import threading
import time
import weakref
from collections import Counter

import pytest

from protocol.errors import DataFailuresError
from protocol.wire.codec import encode
from replay.batch_selection import OfferedGroup
from replay.buffer import RolloutBuffer
from replay.journal.writer import Journal
from replay.watches import FAILURE_WINDOW
from tests.unit.replay.builders import (
    FillableJournal,
    buffer,
    cut,
    delivery,
    fill,
    full_disk,
    group,
    group_message,
    lease,
    memory_folder,
    names,
    offer,
    rows,
    unpublished_buffer,
)

# Leases.


def test_nothing_is_leased_before_the_first_policy_is_published(journal: Journal) -> None:
    replay = unpublished_buffer(journal)
    assert replay.lease("p", now=0.0, timeout_s=1.0) is None
    assert replay.newest_version == -1
    replay.published(0)
    assert lease(replay) == "0-0-0-1-s"
    assert replay.newest_version == 0


@pytest.mark.parametrize(("max_staleness", "leases"), [(0, 2), (1, 4), (3, 8)])
def test_leases_end_with_the_staleness_budget_and_come_back_with_the_next_version(
    journal: Journal, max_staleness: int, leases: int
) -> None:
    replay = buffer(journal, max_staleness=max_staleness)
    given = [lease(replay) for _ in range(leases)]
    assert replay.lease("p", now=0.0, timeout_s=1.0) is None
    for lease_id in given[:2]:
        offer(replay, lease_id)
    assert replay.lease("p", now=0.0, timeout_s=1.0) is None, "what is ready counts too"
    cut(replay)
    replay.published(1)
    assert [lease(replay), lease(replay)]
    assert replay.lease("p", now=0.0, timeout_s=1.0) is None


def test_the_next_lease_and_the_next_batch_have_an_oldest_policy(journal: Journal) -> None:
    replay = buffer(journal, max_staleness=1)
    assert replay.next_floor() == 0
    for lease_id in [lease(replay) for _ in range(4)]:
        offer(replay, lease_id)
    assert (replay.next_floor(), replay.oldest_usable()) == (1, -1)
    cut(replay)
    assert replay.oldest_usable() is None, "v1 is on its way"
    replay.published(1)
    assert (replay.next_floor(), replay.oldest_usable()) == (1, 0)
    cut(replay)
    replay.published(2)
    assert (replay.next_floor(), replay.oldest_usable()) == (1, 1)


def test_a_lease_ends_by_time_or_with_its_producer_unless_it_is_kept(journal: Journal) -> None:
    replay = buffer(journal, max_staleness=3)
    short = lease(replay, "a", timeout_s=1.0)
    kept, lost = lease(replay, "a"), lease(replay, "a")
    other = lease(replay, "b")
    assert replay.leased_to("a") == {short, kept, lost}
    assert replay.expire(0.99) == []
    assert [record.lease_id for record in replay.expire(1.0)] == [short]
    assert [record.lease_id for record in replay.release("a", 2.0, frozenset([kept, "of-another-run"]))] == [lost]
    assert replay.leased_to("a") == {kept}
    assert replay.leased_to("b") == {other}
    assert replay.totals == Counter({"leased": 4, "failed_expired": 1, "failed_released": 1})
    assert replay.depth() == {"ready": 0, "leased": 2, "replayable": 0, "deferred": 0, "epoch": 0}


def test_a_lease_whose_producer_left_on_a_full_disk_ends_when_there_is_room(journal: FillableJournal) -> None:
    replay = buffer(journal, num_prompts=1)
    for _ in range(9):
        replay.fail(lease(replay, now=99.0), "expired", "", -99.0)
    last = lease(replay, "a", now=99.0, timeout_s=60.0)
    with full_disk(journal):
        assert replay.release("a", 100.0) == []
        assert replay.expire(100.2) == []
        assert replay.leased_to("a") == {last}
    assert replay.expire(100.4) == []
    assert replay.leased_to("a") == set()
    assert journal.query("SELECT reason, detail FROM dead_letters") == [("released", "leased to a")]


# Groups.


def test_a_batch_holds_the_first_groups_and_everything_that_arrived(journal: Journal) -> None:
    replay = buffer(journal, max_staleness=2)
    first, dull, second, third = (lease(replay) for _ in range(4))
    assert offer(replay, first) == "accepted"
    assert replay.next_batch(0.0) is None
    assert offer(replay, dull, signal=False) == "no_signal"
    assert offer(replay, third) == "accepted"
    batch = cut(replay)
    assert (batch.first_step, batch.num_iterations) == (1, 1)
    assert names(batch.groups) == [first, third]
    assert [(arrival.outcome, len(arrival.rewards)) for arrival in batch.arrivals] == [
        ("accepted", 2),
        ("no_signal", 2),
        ("accepted", 2),
    ]
    replay.published(1)
    offer(replay, second)
    fill(replay, 1, count=1)
    following = cut(replay)
    assert following.first_step == 2
    assert len(following.arrivals) == 2


def test_of_what_arrives_without_signal_no_completion_stays_in_memory(journal: Journal) -> None:
    """A run that has converged gets few others, and may wait long for a batch."""
    replay = buffer(journal, max_staleness=2)
    dull = delivery(lease(replay), signal=False)
    completions, logprobs = weakref.ref(dull.group.completion_ids), weakref.ref(dull.group.logprobs)
    assert replay.offer([dull]) == ["no_signal"]
    del dull
    assert completions() is None
    assert logprobs() is None
    fill(replay)
    arrival, *_ = cut(replay).arrivals
    assert (arrival.rewards.tolist(), arrival.lengths.tolist(), arrival.truncated.tolist()) == (
        [[0.0], [0.0]], [3, 1], [False, True],
    )  # fmt: skip


def test_groups_that_arrive_together_are_judged_together_and_in_order(journal: Journal) -> None:
    replay = buffer(journal, num_prompts=3, groups_per_step=3)
    late = lease(replay, timeout_s=1.0)
    replay.expire(1.0)
    again = lease(replay, now=2.0)
    dull = lease(replay)
    arriving = [delivery(i) for i in (again, late, again, "other-1")] + [delivery(dull, signal=False)]
    assert replay.offer(arriving) == ["accepted", "duplicate", "duplicate", "unknown_lease", "no_signal"]
    assert rows(journal, "lease_id, outcome") == [(again, "accepted"), (dull, "no_signal")]
    assert replay.offer([]) == []
    assert {n: replay.totals[n] for n in ("accepted", "no_signal", "duplicate", "unknown_lease", "stale")} == {
        "accepted": 1, "no_signal": 1, "duplicate": 2, "unknown_lease": 1, "stale": 0,
    }  # fmt: skip


def test_a_group_is_in_the_journal_when_its_outcome_is_known(journal: Journal) -> None:
    replay = buffer(journal)
    lease_id = lease(replay)
    message = group_message(lease_id)
    frame = encode(message)
    assert replay.offer([OfferedGroup(group(lease_id), frame, "gpu-3")]) == ["accepted"]
    columns = "lease_id, epoch, prompt_id, attempt, producer, policy_version, outcome, reward, num_tokens, num_bytes"
    assert rows(journal, columns) == [(lease_id, 0, 0, 1, "gpu-3", 0, "accepted", 0.5, 4, len(frame))]
    assert journal.frames([lease_id]) == [frame]


def test_a_group_that_is_too_old_on_arrival_sends_its_prompt_out_again(journal: Journal) -> None:
    replay = buffer(journal, groups_per_step=1, max_staleness=1)
    slow = lease(replay)
    for version in (0, 1):
        fill(replay, version, count=1)
        cut(replay)
        replay.published(version + 1)
    assert offer(replay, slow, 0) == "stale"
    assert offer(replay, slow, 0) == "duplicate"
    record = replay.lease("p", now=0.0, timeout_s=1.0)
    assert (record.task.key.prompt_id, record.task.attempt, record.policy_floor) == (0, 2, 1)
    assert replay.totals["stale"] == 1
    assert rows(journal)[-1] == (slow, "stale", None, None, None)


def test_after_a_stale_group_a_usable_one_for_the_same_prompt_is_accepted_in_the_same_breath(journal: Journal) -> None:
    replay = buffer(journal, groups_per_step=1)
    late = lease(replay, timeout_s=1.0)
    replay.expire(1.0)
    fill(replay, 0, count=1)
    cut(replay)
    replay.published(1)
    again = lease(replay, now=2.0)
    assert replay.offer([delivery(late, 0), delivery(again, 1)]) == ["stale", "accepted"]
    assert names(cut(replay).groups) == [again]


def test_a_group_that_grows_too_old_in_the_table_is_dropped_and_its_prompt_goes_out_again(journal: Journal) -> None:
    replay = buffer(journal, groups_per_step=1)
    late = lease(replay, timeout_s=1.0)
    replay.expire(1.0)
    (prompt_1,) = fill(replay, 0, count=1)  # prompt 0 still waits for its second try
    assert offer(replay, late, 0) == "accepted"
    assert names(cut(replay).groups) == [prompt_1]
    replay.published(1)
    assert replay.next_batch(0.0) is None
    assert replay.totals["went_stale"] == 1
    assert replay.depth()["ready"] == 0
    assert rows(journal) == [(prompt_1, "accepted", None, 1, 1), (late, "accepted", "stale", None, None)]
    record = replay.lease("p", now=0.0, timeout_s=1.0)
    assert record is not None
    assert (record.task.key.prompt_id, record.task.attempt) == (0, 2)


# Failures.


def test_failures_are_counted_by_reason_and_prompts_given_up_become_dead_letters(journal: Journal) -> None:
    replay = buffer(journal, num_prompts=3, data_attempts=2)
    assert replay.fail(lease(replay), "reward_failed", "boom", 0.0) is True
    assert replay.fail(lease(replay, now=5.0), "reward_failed", "bang", 5.0) is False
    assert replay.fail(lease(replay), "prompt_too_long", "900 tokens", 5.0) is False
    assert replay.fail("0-1-0-1-s", "prompt_too_long", "again", 5.0) is None
    assert replay.totals == Counter(
        {
            "leased": 3,
            "failed_reward_failed": 2,
            "failed_prompt_too_long": 1,
            "dead_letters": 2,
        }
    )
    letters = journal.query("SELECT epoch, prompt_id, attempts, failure, reason, detail FROM dead_letters ORDER BY id")
    assert letters == [(0, 0, 2, "data", "reward_failed", "bang"), (0, 1, 1, "data", "prompt_too_long", "900 tokens")]


def answer(replay: RolloutBuffer, *, failures: int, successes: int) -> None:
    for _ in range(failures):
        replay.fail(lease(replay), "bad_prompt", "ZeroDivisionError: division by zero", 0.0)
    for _ in range(successes):
        offer(replay, lease(replay), signal=False)


def test_the_run_stops_at_exactly_the_share_of_dead_letters_that_is_not_allowed(journal: Journal) -> None:
    assert FAILURE_WINDOW == 64
    replay = buffer(journal)
    answer(replay, failures=32, successes=32)  # half of the window: just allowed
    assert replay.next_batch(0.0) is None
    answer(replay, failures=32, successes=0)  # drives the first failures out of the window, so still half
    assert replay.next_batch(0.0) is None
    answer(replay, failures=1, successes=0)  # drives a success out
    with pytest.raises(DataFailuresError) as caught:
        replay.next_batch(0.0)
    assert str(caught.value) == (
        "33 of the last 64 prompts were given up, more than pipeline.max_failed_share=0.5 allows. "
        "The last one: bad_prompt: ZeroDivisionError: division by zero"
    )
    assert caught.value.exit_code == 66


# Two threads.


@pytest.mark.long
def test_two_threads_lose_nothing() -> None:
    """Producers answer, lose, repeat and fail leases at random while the trainer cuts and publishes."""
    with memory_folder() as folder, contextlib.closing(Journal(folder / "journal")) as journal:
        check_two_threads(journal)


def check_two_threads(journal: Journal) -> None:
    replay = buffer(
        journal, num_prompts=40, groups_per_step=3, max_staleness=1, max_failed_share=1.0, data_attempts=1_000_000
    )
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
                    replay.release("a", now)
                if not out:
                    continue
                lease_id = out.pop(draw.randrange(len(out)))
                ended.append(lease_id)
                kind = draw.random()
                if kind < 0.7:
                    offer(replay, lease_id, published, signal=draw.random() < 0.8)
                elif kind < 0.8:
                    replay.fail(lease_id, "reward_failed", "", now)
                elif kind < 0.9:
                    replay.give_back(lease_id)
                if draw.random() < 0.1:
                    assert offer(replay, draw.choice(ended[-50:]), published) in ("duplicate", "accepted", "stale")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=producers)
    thread.start()
    trained: list[str] = []
    deadline = time.monotonic() + 30
    while len(trained) < 900 and time.monotonic() < deadline and not errors:
        batch = replay.next_batch(0.2)
        if batch is not None:
            assert all(published - g.policy_version <= 1 for g in batch.groups)
            trained += names(batch.groups)
            published += 1
            journal.end_step(published)
            journal.note_policy(published, published, "digest")
            replay.published(published)
    done.set()
    thread.join()
    assert errors == []
    assert len(trained) == 900 == len(set(trained)), "a group was trained twice"
    counts, depth, unsettled = replay.totals, replay.depth(), replay.state()["ledger"]["unsettled"]
    assert counts["trained"] == 900
    assert counts["accepted"] == 900 + depth["ready"] + counts["went_stale"]
    epoch, position = replay.state()["ledger"]["epoch"], replay.state()["ledger"]["position"]
    settled = 900 + counts["no_signal"] + counts["dead_letters"]
    assert epoch * 40 + position == settled + len(unsettled), "a prompt was lost or settled twice"
    for outcome in ("accepted", "no_signal", "stale"):
        assert journal.query("SELECT count(*) FROM groups WHERE outcome = ?", (outcome,)) == [(counts[outcome],)]
    assert journal.query("SELECT lease_id FROM groups WHERE step IS NOT NULL ORDER BY step, position") == [
        (lease_id,) for lease_id in trained
    ]
