"""On a full disk nothing is decided; the next trainer process goes on where the checkpoint and the journal say."""

import pytest

from replay.journal.writer import Journal, JournalFullError
from tests.unit.replay.builders import (
    FillableJournal,
    buffer,
    cut,
    delivery,
    fill,
    full_disk,
    lease,
    names,
    offer,
    resumed,
    rows,
)

# A full disk.


def test_on_a_full_disk_no_group_is_decided_and_the_same_offer_succeeds_later(journal: FillableJournal) -> None:
    replay = buffer(journal)
    first, second = lease(replay), lease(replay)
    arriving = [delivery(first), delivery(second, signal=False)]
    before = replay.state(), dict(replay.totals), replay.depth()
    with full_disk(journal):
        for _ in range(2):
            with pytest.raises(JournalFullError, match=r"the disk of .* is full"):
                replay.offer(arriving)
        assert (replay.state(), dict(replay.totals), replay.depth()) == before
    assert replay.offer(arriving) == ["accepted", "no_signal"]


def test_on_a_full_disk_a_prompt_is_not_given_up_but_other_failures_are_taken(journal: FillableJournal) -> None:
    replay = buffer(journal, max_staleness=3, data_attempts=2)
    hopeless, retried = lease(replay, timeout_s=1.0), lease(replay)
    with full_disk(journal):
        with pytest.raises(JournalFullError):
            replay.fail(hopeless, "bad_prompt", "x" * 4000, 0.0)
        assert replay.fail(retried, "reward_failed", "boom", 0.0) is True
        assert replay.depth()["leased"] == 1
        assert replay.totals["dead_letters"] == 0
    assert replay.fail(hopeless, "bad_prompt", "x" * 4000, 0.0) is False
    assert replay.totals["dead_letters"] == 1


def test_on_a_full_disk_nothing_is_dropped(journal: FillableJournal) -> None:
    replay = buffer(journal, groups_per_step=1)
    late = lease(replay, timeout_s=1.0)
    replay.expire(1.0)
    fill(replay, 0, count=1)
    offer(replay, late)
    cut(replay)
    with full_disk(journal):
        assert replay.next_batch(0.0) is None
        assert (replay.depth()["ready"], replay.totals["went_stale"]) == (1, 0)
    assert replay.next_batch(0.0) is None
    assert (replay.depth()["ready"], replay.totals["went_stale"]) == (0, 1)


# The next trainer process.


def test_the_next_process_trains_what_was_not_trained_and_loses_nothing(journal: Journal) -> None:
    replay = buffer(journal, num_prompts=6, max_staleness=1)
    ids = fill(replay, 0, count=3)
    out = lease(replay)
    cut(replay)
    journal.end_step(1)
    journal.note_policy(1, 1, "digest")
    state = replay.state()
    dull = "0-4-0-1-s"
    assert offer(replay, dull, signal=False) == "no_signal"

    restored = resumed(journal, state, 1, num_prompts=6, max_staleness=1)
    assert restored.depth() == {"ready": 1, "leased": 0, "replayable": 0, "deferred": 0, "epoch": 0}
    assert restored.newest_version == 1
    assert restored.adopt("p", [ids[0], ids[2], out, dull, "no lease"], deadline=9.0) == {
        ids[0]: None, ids[2]: None, out: True, dull: None, "no lease": False,
    }  # fmt: skip
    assert lease(restored) == "0-5-0-1-t"
    assert offer(restored, out) == "accepted"
    batch = cut(restored)
    assert (batch.first_step, names(batch.groups)) == (2, [ids[2], out])
    assert restored.totals["trained"] == 4
    assert restored.totals["leased"] == 4 + 1
    assert restored.totals["adopted"] == 1


def test_a_resumed_batch_is_noted_again_before_it_is_handed_over(journal: FillableJournal) -> None:
    replay = buffer(journal)
    ids = fill(replay)
    cut(replay)
    restored = resumed(journal, None, 0)
    with full_disk(journal):
        assert restored.next_batch(0.0) is None
    assert restored.depth()["ready"] == 2
    assert rows(journal, "tries") == [(1,), (1,)]
    assert names(cut(restored).groups) == ids
    assert rows(journal, "tries") == [(2,), (2,)]
