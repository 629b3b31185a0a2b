"""From scrapes to numbers: by hand."""

import dataclasses

import pytest

from tests.unit.tools.status.builders import PRODUCER, PRODUCER_TEXT, TRAINER, TRAINER_TEXT, answer, text_with
from tools.status.reading import read
from tools.status.scrape import Answer
from tools.status.sources import Source


def test_the_numbers_of_one_look() -> None:
    shown = read([[answer(TRAINER_TEXT), answer(PRODUCER_TEXT, PRODUCER)]], {30: 0.75})
    trainer = shown.trainer
    assert trainer is not None
    assert (trainer.run, trainer.step, trainer.max_steps, trainer.policy_version) == ("ab12", 30, 60, 30)
    assert trainer.rates_since_start
    assert trainer.rates_over_s == 180.0, "the time that it waited and trained"
    assert trainer.wait_share == pytest.approx(120 / 180)
    assert trainer.step_pace_s == pytest.approx(6.0)
    assert trainer.since_last_step_s == 2.0
    assert trainer.eta_s == pytest.approx(30 * 6.0)
    assert trainer.tokens_generated_per_s == pytest.approx(100.0)
    assert trainer.tokens_trained_per_s == pytest.approx(50.0)
    assert trainer.journal_commit_s == pytest.approx(0.004)
    assert trainer.loss is None, "NaN is not known yet"
    assert trainer.groups_received == {"accepted": 486, "no_signal": 20, "stale": 0}
    far, near = shown.producers
    assert (far.name, far.address, far.policy_version, far.lag, far.leases) == (
        "far-9-cd",
        None,
        -1,
        None,
        {"held": 20},
    )
    assert (near.name, near.lag, near.heard_s, near.connected) == ("gpu0-7-ab", 1, 0.5, True)
    assert near.leases == {"waiting": 1, "generating": 20, "scoring": 0, "unacked": 1}
    assert near.idle_share == pytest.approx(0.1)
    assert near.tokens_per_s == pytest.approx(200.0)
    assert (near.swap_mean_s, near.swap_last_s) == (pytest.approx(0.2), None)
    assert shown.answers


def test_rates_are_over_the_looks_once_these_span_long_enough() -> None:
    before = [answer(TRAINER_TEXT, at=1000.0), answer(PRODUCER_TEXT, PRODUCER, at=1000.0)]
    after = [
        answer(
            text_with(
                TRAINER_TEXT, step_seconds_count=34, step_seconds_sum=70, wait_seconds_total=130,
                tokens_trained_total=9400,
            ),
            at=1020.0,
        ),
        answer(
            text_with(
                PRODUCER_TEXT, busy_seconds_total=95, idle_seconds_total=25, completion_tokens_total=24000,
                swap_seconds_count=34, swap_seconds_sum=7,
            ),
            PRODUCER,
            at=1020.0,
        ),
    ]  # fmt: skip
    shown = read([before, after], {})
    trainer, near = shown.trainer, shown.producers[1]
    assert trainer is not None
    assert (trainer.rates_since_start, trainer.rates_over_s) == (False, 20.0)
    assert trainer.wait_share == pytest.approx(0.5)
    assert trainer.step_pace_s == pytest.approx(5.0)
    assert trainer.tokens_trained_per_s == pytest.approx(20.0)
    assert near.idle_share == pytest.approx(0.75)
    assert near.tokens_per_s == pytest.approx(200.0)
    assert near.swap_last_s == near.swap_mean_s == pytest.approx(0.25)


def test_the_last_swap_is_that_of_the_newest_interval_that_had_one() -> None:
    swaps = [(1000.0, 30, 6.0), (1002.0, 31, 6.5), (1004.0, 31, 6.5)]
    looks = [
        [answer(text_with(PRODUCER_TEXT, swap_seconds_count=count, swap_seconds_sum=total), PRODUCER, at=at)]
        for at, count, total in swaps
    ]
    (producer,) = read(looks, {}).producers
    assert producer.swap_last_s == pytest.approx(0.5)
    assert producer.swap_mean_s == pytest.approx(6.5 / 31)


def test_looks_at_a_process_that_was_started_again_are_not_compared_with_the_one_before() -> None:
    before = answer(TRAINER_TEXT, at=1000.0, start=800.0)
    again = text_with(
        TRAINER_TEXT, step_seconds_count=3, step_seconds_sum=3, wait_seconds_total=1, tokens_trained_total=80,
        last_step_timestamp_seconds=1058,
    )  # fmt: skip
    trainer = read([[before], [answer(again, at=1060.0, start=1040.0)]], {}).trainer
    assert trainer is not None
    assert trainer.rates_since_start
    assert trainer.wait_share == pytest.approx(0.25)
    assert trainer.tokens_trained_per_s == pytest.approx(20.0)


def test_while_no_step_ends_rates_are_those_since_the_start() -> None:
    trainer = read([[answer(TRAINER_TEXT, at=1000.0)], [answer(TRAINER_TEXT, at=1050.0)]], {}).trainer
    assert trainer is not None
    assert trainer.rates_since_start
    assert trainer.wait_share == pytest.approx(120 / 180)


@pytest.mark.parametrize(("span_s", "share"), [(9.0, 0.2), (10.0, 1.0)])
def test_looks_that_span_less_than_ten_seconds_give_no_rates(span_s: float, share: float) -> None:
    later = text_with(PRODUCER_TEXT, idle_seconds_total=22.5)
    looks = [[answer(PRODUCER_TEXT, PRODUCER, at=1000.0)], [answer(later, PRODUCER, at=1000.0 + span_s)]]
    (producer,) = read(looks, {}).producers
    assert producer.rates_since_start is (span_s < 10)
    assert producer.idle_share == pytest.approx(share)


def test_there_is_no_estimate_while_steps_are_late_nor_after_the_first_two() -> None:
    for text, at in ((TRAINER_TEXT, 1031.0), (text_with(TRAINER_TEXT, step=2), 1000.0)):
        trainer = read([[answer(text, at=at)]], {}).trainer
        assert trainer is not None
        assert (trainer.step_pace_s, trainer.eta_s) == (pytest.approx(6.0), None)
    trainer = read([[answer(TRAINER_TEXT, at=1027.0)]], {}).trainer
    assert trainer is not None
    assert trainer.eta_s == pytest.approx(180.0)


def test_a_trainer_that_trains_from_a_journal_has_no_pipeline() -> None:
    learning = "rl_trainer_step 3\nrl_trainer_max_steps 9\nrl_trainer_reward 0.5\n"
    shown = read([[answer(learning)]], {})
    assert shown.trainer is not None
    assert (shown.trainer.step, shown.trainer.policy_version, shown.trainer.wait_share) == (3, None, None)
    assert shown.producers == []


def test_a_daemon_that_does_not_answer_keeps_its_name_and_its_reason() -> None:
    gone = Answer(dataclasses.replace(PRODUCER, process_gone=True), 1000.0, error="gone")
    stranger = Answer(Source("h:9"), 1000.0, error="connection refused")
    shown = read([[Answer(TRAINER, 1000.0, error="timed out"), gone, stranger]], {})
    assert shown.trainer is not None
    assert shown.trainer.error == "timed out"
    assert [(producer.name, producer.error) for producer in shown.producers] == [("gpu0-7-ab", "gone")]
    assert shown.silent == {"h:9": "connection refused"}
    assert not shown.answers


def test_a_trainer_that_answers_counts_before_one_that_was_killed() -> None:
    killed = Answer(Source("h:1", "rl-trainer", "old", True), 1000.0, error="gone")
    shown = read([[killed, answer(TRAINER_TEXT)]], {})
    assert shown.trainer is not None
    assert shown.trainer.step == 30


def test_producers_alone_are_shown_too() -> None:
    shown = read([[answer(PRODUCER_TEXT, PRODUCER, checks={"phase": "ok", "trainer": "not connected"})]], {})
    assert shown.trainer is None
    assert shown.producers[0].not_ready == {"trainer": "not connected"}
    assert shown.producers[0].lag is None
