"""Training again from a journal: the recorded batches in the recorded order, and a plain word where that cannot be."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from consumer.app.feed import RecordedFeed, RecordedRun
from consumer.app.wiring import recorded_run
from consumer.waiting import StopRequested
from protocol.errors import ConfigError, JournalError
from protocol.exposition import Watch
from protocol.wire.codec import SCHEMA_VERSION
from replay.journal.retention import Retention
from replay.journal.schema import RecordedBatch
from replay.journal.writer import Journal
from tests.unit.consumer.builders import SHAPE, fill, live_buffer, run_config
from tests.unit.replay.builders import replay_table

FACTS = {
    "run_id": "run",
    "base_model_digest": "base",
    "tokenizer_digest": "tokens",
    "num_generations": "4",
    "max_completion_length": "6",
    "reward_names": '["first"]',
    "groups_per_step": "2",
    "num_iterations": "1",
    "num_threads": "3",
    "initial_adapter_digest": "",
    "quantization": "",
    "wire_schema": str(SCHEMA_VERSION),
}


def record(journal: Journal, num_batches: int, *, num_iterations: int = 1) -> list[list[str]]:
    """A run of so many batches; returns their groups. One more group is ready at its end."""
    journal.note_facts(FACTS | {"num_iterations": str(num_iterations)})
    replay = live_buffer(journal, num_iterations=num_iterations, max_staleness=9)
    result = []
    for number in range(num_batches):
        fill(replay)
        batch = replay.next_batch(0.0)
        assert batch is not None
        for step in range(batch.first_step, batch.last_step + 1):
            journal.end_step(step)
            journal.note_policy(step, step, f"digest {step}")
        replay.published(number + 1)
        result.append([group.lease_id for group in batch.groups])
    fill(replay, 1)
    return result


@pytest.fixture
def recorded(tmp_path: Path, journal: Journal) -> Iterator[RecordedRun]:
    journal.note_facts(FACTS)
    with closing(RecordedRun(tmp_path)) as result:
        yield result


def batches(recorded: RecordedRun, from_step: int = 1) -> list[tuple[int, int, int, list[str]]]:
    return [
        (batch.first_step, batch.num_iterations, batch.last_step, [group.lease_id for group in batch.groups])
        for batch in recorded.batches(from_step, SHAPE)
    ]


def test_every_recorded_batch_in_order_and_nothing_else(journal: Journal, recorded: RecordedRun) -> None:
    made = record(journal, 3)
    assert batches(recorded) == [(1, 1, 1, made[0]), (2, 1, 2, made[1]), (3, 1, 3, made[2])]
    assert batches(recorded, 3) == [(3, 1, 3, made[2])]


def test_groups_that_were_replayed_are_replayed_again(journal: Journal, recorded: RecordedRun) -> None:
    journal.note_facts(FACTS)
    replay = live_buffer(journal, max_staleness=9, replay=replay_table(), max_replayed=1)
    made = [fill(replay), [*fill(replay, 1, dull=1), "0-0-0-1-s"]]
    for step in (1, 2):
        assert replay.next_batch(0.0) is not None
        journal.end_step(step)
    assert batches(recorded) == [(1, 1, 1, made[0]), (2, 1, 2, made[1])]
    assert [batch.num_fresh for batch in recorded.batches(1, SHAPE)] == [2, 1]
    counts: Counter[str] = Counter()
    with pytest.raises(StopRequested):
        list(feed(recorded, counts))
    assert counts == {"trained": 3, "replayed": 1} == {name: replay.totals[name] for name in counts}


def test_a_small_batch_stays_small(journal: Journal, recorded: RecordedRun) -> None:
    journal.note_facts(FACTS)
    replay = live_buffer(journal, max_staleness=9, sampled=True)
    made = [fill(replay, 1, dull=3), fill(replay, 2)]
    for step in (1, 2):
        assert replay.next_batch(0.0) is not None
        journal.end_step(step)
    assert [groups for *_, groups in batches(recorded)] == made


def test_a_start_behind_the_last_batch_has_nothing_to_train(journal: Journal, recorded: RecordedRun) -> None:
    record(journal, 3)
    with pytest.raises(JournalError, match=r"the groups of step 4 are not in the journal \(any more\)"):
        batches(recorded, 4)


def test_groups_of_a_batch_come_in_the_order_of_the_step_and_not_of_arrival(
    journal: Journal, recorded: RecordedRun
) -> None:
    [[first, second]] = record(journal, 1)
    journal.claim(RecordedBatch(1, 1, [second, first], 2))
    journal.end_step(1)
    assert batches(recorded) == [(1, 1, 1, [second, first])]


def test_groups_are_what_the_producer_sent(journal: Journal, recorded: RecordedRun) -> None:
    record(journal, 1)
    [batch] = recorded.batches(1, SHAPE)
    assert len(batch.arrivals) == 0
    assert batch.groups[0].completion_ids.tolist() == [3, 4, 5, 6]
    assert batch.groups[0].rewards[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_several_iterations_and_a_start_between_them(journal: Journal, recorded: RecordedRun) -> None:
    """A run may end by max_steps between the iterations over a batch, and go on from there."""
    made = record(journal, 2, num_iterations=3)
    assert batches(recorded) == [(1, 3, 3, made[0]), (4, 3, 6, made[1])]
    assert batches(recorded, 3) == [(1, 1, 3, made[0]), (4, 3, 6, made[1])]
    assert batches(recorded, 5) == [(4, 2, 6, made[1])]


def test_a_batch_that_retention_left_a_part_of_is_a_gap(journal: Journal, recorded: RecordedRun) -> None:
    made = record(journal, 3)
    spared = {made[0][1]}  # it may be replayed
    Retention(journal).prune(
        oldest_step=1, oldest_seq=journal.last_seq, replayable=spared, keep_bytes=0, keep_age_s=1.0
    )
    with pytest.raises(JournalError) as caught:
        batches(recorded)
    assert str(caught.value) == (
        "--from-journal: the groups of step 1 are not in the journal (any more). "
        "Runs that will be trained again need replay.keep_all: true"
    )
    assert batches(recorded, 2)[0] == (2, 1, 2, made[1]), "what is needed is there"


def test_a_gap_in_the_middle_is_found_after_what_comes_before_it(journal: Journal, recorded: RecordedRun) -> None:
    made = record(journal, 3)
    with journal.transaction() as db:
        db.execute("DELETE FROM bodies WHERE seq IN (SELECT seq FROM groups WHERE step = 2)")
        db.execute("DELETE FROM groups WHERE step = 2")
    found = recorded.batches(1, SHAPE)
    assert [group.lease_id for group in next(found).groups] == made[0]
    with pytest.raises(JournalError, match="the groups of step 2 are not in the journal"):
        next(found)


def test_the_facts_that_must_be_the_same(recorded: RecordedRun) -> None:
    assert recorded.check(FACTS | {"run_id": "?", "num_threads": "1", "model_path": "elsewhere"}) == "run"
    assert recorded.num_threads == 3


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("initial_adapter_digest", "lora.init_from"),
        ("base_model_digest", "model.path"),
        ("tokenizer_digest", "model.path (its tokenizer)"),
        ("num_generations", "sampling.num_generations"),
        ("max_completion_length", "sampling.max_completion_length"),
        ("reward_names", "rewards.functions"),
        ("groups_per_step", "pipeline.groups_per_step"),
        ("num_iterations", "trainer.num_iterations"),
        ("quantization", "model.quantization"),
    ],
)
def test_a_fact_that_differs_is_named_with_both_values(recorded: RecordedRun, name: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recorded.check(FACTS | {name: "other"})
    assert str(caught.value) == f"--from-journal: {key} is other, the run was made with {FACTS[name] or 'none'}"


def test_the_checkpoint_of_another_run_is_not_trained_on(tmp_path: Path, recorded: RecordedRun) -> None:
    config = run_config(tmp_path / "again")
    checkpoint = config.checkpoints_dir / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "pipeline_state.json").write_text('{"step": 2, "run_id": "another"}')
    setup: Any = SimpleNamespace(config=config, facts=lambda run_id: FACTS)
    with pytest.raises(ConfigError, match=r"run_dir: .*checkpoint-2"):
        recorded_run(setup, recorded, cast("Watch", None), resume=True)


def test_answers_are_those_of_the_rows_that_the_run_had(tmp_path: Path, journal: Journal) -> None:
    journal.note_facts(FACTS | {"dataset_digest": "rows"})
    with closing(RecordedRun(tmp_path)) as recorded:
        assert recorded.check(FACTS | {"dataset_digest": "rows", "learns_from_rows": "true"}) == "run"
        assert recorded.check(FACTS | {"dataset_digest": "others"}) == "run"
        with pytest.raises(ConfigError, match=r"loss\.ce_coef"):
            recorded.check(FACTS | {"dataset_digest": "others", "learns_from_rows": "true"})


def test_a_journal_of_another_schema_is_refused(tmp_path: Path, journal: Journal) -> None:
    journal.note_facts(FACTS | {"wire_schema": str(SCHEMA_VERSION + 1)})
    with closing(RecordedRun(tmp_path)) as recorded, pytest.raises(JournalError) as caught:
        recorded.check(FACTS)
    assert f"{journal.path} has groups of protocol schema {SCHEMA_VERSION + 1}" in str(caught.value)


def feed(recorded: RecordedRun, counts: Counter[str], *, first_step: int = 0, checks: int = 99) -> RecordedFeed:
    left = iter(range(checks))

    def check() -> None:
        if next(left, None) is None:
            raise StopRequested

    return RecordedFeed(recorded, SHAPE, check, first_step, counts)


def consumed(recorded_feed: RecordedFeed, counts: Counter[str]) -> list[list[str]]:
    """The groups of every batch until the feed ends the run."""
    seen: list[list[str]] = []
    try:
        for batch in recorded_feed:
            assert recorded_feed.last is batch
            seen.append([group.lease_id for group in batch.groups])
            assert counts["trained"] == 2 * len(seen)
    except StopRequested:
        return seen
    raise AssertionError("it ends a run by StopRequested")


def test_the_feed_goes_on_after_the_checkpoint_and_ends_the_run_after_the_last_batch(
    journal: Journal, recorded: RecordedRun
) -> None:
    made = record(journal, 3)
    counts: Counter[str] = Counter()
    recorded_feed = feed(recorded, counts, first_step=1)
    assert consumed(recorded_feed, counts) == made[1:]
    assert recorded_feed.wait_s == 0.0


def test_a_stop_request_ends_the_feed_before_the_next_batch(journal: Journal, recorded: RecordedRun) -> None:
    made = record(journal, 3)
    counts: Counter[str] = Counter()
    assert consumed(feed(recorded, counts, checks=2), counts) == made[:2]
