"""From status documents to numbers: by hand."""

import msgspec
import pytest

from docs.generate_metrics import producer_registry, trainer_registry
from slipstream.run_reader import DaemonAddress
from slipstream.status.daemons import Answer
from slipstream.status.reading import TrainerView, read
from tests.unit.slipstream.status.builders import PRODUCER, SAID, TRAINER, answer


def trainer_of(*looks: list[Answer]) -> TrainerView:
    trainer = read(looks).trainer
    assert trainer is not None
    return trainer


def test_the_numbers_of_one_look() -> None:
    shown = read([[answer(), answer(PRODUCER)]])
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
    assert (near.sequences_per_step, near.tokens_per_step, near.graph_share) == (220.0, 300.0, 0.75)
    assert (near.swap_mean_s, near.swap_last_s) == (pytest.approx(0.2), None)
    assert shown.answers


def test_rates_are_over_the_looks_once_these_span_long_enough() -> None:
    before = [answer(), answer(PRODUCER)]
    after = [
        answer(at=1020.0, step_seconds_count=34, step_seconds_sum=70, wait_seconds=130, tokens_trained=9400),
        answer(
            PRODUCER, at=1020.0, busy_seconds=95, idle_seconds=25, completion_tokens=24000, swap_seconds_count=34,
            swap_seconds_sum=7,
        ),
    ]  # fmt: skip
    trainer, near = trainer_of(before, after), read([before, after]).producers[1]
    assert (trainer.rates_since_start, trainer.rates_over_s) == (False, 20.0)
    assert trainer.wait_share == pytest.approx(0.5)
    assert trainer.step_pace_s == pytest.approx(5.0)
    assert trainer.tokens_trained_per_s == pytest.approx(20.0)
    assert near.idle_share == pytest.approx(0.75)
    assert near.tokens_per_s == pytest.approx(200.0)
    assert near.swap_last_s == near.swap_mean_s == pytest.approx(0.25)


def test_the_failures_of_a_teacher_are_a_share_of_the_completions_since_the_look_before() -> None:
    looks = [
        [answer(PRODUCER, at=at, teacher_failures={"big": failures}, completions=completions, busy_seconds=at)]
        for at, failures, completions in ((1000.0, 4, 100), (1020.0, 14, 150), (1040.0, 20, 150))
    ]
    assert read(looks[:1]).producers[0].teacher_failed_shares == {"big": 0.04}
    assert read(looks[:2]).producers[0].teacher_failed_shares == {"big": 0.2}
    assert read(looks[1:]).producers[0].teacher_failed_shares == {}, "nothing was generated"


def test_the_last_swap_is_that_of_the_newest_interval_that_had_one() -> None:
    swaps = [(1000.0, 30, 6.0), (1002.0, 31, 6.5), (1004.0, 31, 6.5)]
    looks = [[answer(PRODUCER, at=at, swap_seconds_count=count, swap_seconds_sum=total)] for at, count, total in swaps]
    looks += [
        [answer(PRODUCER, at=1006.0, started=1005.0, swap_seconds_count=40, swap_seconds_sum=9.0)]
    ]  # another process
    (producer,) = read(looks[:-1]).producers
    assert producer.swap_last_s == pytest.approx(0.5)
    assert read(looks).producers[0].swap_last_s == pytest.approx(0.5)
    assert producer.swap_mean_s == pytest.approx(6.5 / 31)


def test_looks_at_a_process_that_was_started_again_are_not_compared_with_the_one_before() -> None:
    again = answer(
        at=1060.0, started=1040.0, step_seconds_count=3, step_seconds_sum=3, wait_seconds=1, tokens_trained=80,
        last_step_timestamp_seconds=1058,
    )  # fmt: skip
    trainer = trainer_of([answer()], [again])
    assert trainer.rates_since_start
    assert trainer.wait_share == pytest.approx(0.25)
    assert trainer.tokens_trained_per_s == pytest.approx(20.0)


def test_while_no_step_ends_rates_are_those_since_the_start() -> None:
    trainer = trainer_of([answer()], [answer(at=1050.0)])
    assert trainer.rates_since_start
    assert trainer.wait_share == pytest.approx(120 / 180)


@pytest.mark.parametrize(("span_s", "share"), [(9.0, 0.2), (10.0, 1.0)])
def test_looks_that_span_less_than_ten_seconds_give_no_rates(span_s: float, share: float) -> None:
    looks = [[answer(PRODUCER)], [answer(PRODUCER, at=1000.0 + span_s, idle_seconds=22.5)]]
    (producer,) = read(looks).producers
    assert producer.rates_since_start is (span_s < 10)
    assert producer.idle_share == pytest.approx(share)


def test_there_is_no_estimate_while_steps_are_late_nor_after_the_first_two() -> None:
    for late_or_new in (answer(at=1031.0), answer(step=2)):
        trainer = trainer_of([late_or_new])
        assert (trainer.step_pace_s, trainer.eta_s) == (pytest.approx(6.0), None)
    assert trainer_of([answer(at=1027.0)]).eta_s == pytest.approx(180.0)


def test_a_daemon_that_does_not_answer_keeps_its_name_and_its_reason() -> None:
    gone = Answer(PRODUCER._replace(process_gone=True), 1000.0, error="gone")
    stranger = Answer(DaemonAddress("h:9"), 1000.0, error="connection refused")
    shown = read([[Answer(TRAINER, 1000.0, error="timed out"), gone, stranger]])
    assert shown.trainer is not None
    assert shown.trainer.error == "timed out"
    assert [(producer.name, producer.error) for producer in shown.producers] == [("gpu0-7-ab", "gone")]
    assert shown.silent == {"h:9": "connection refused"}
    assert not shown.answers


def test_a_trainer_that_answers_counts_before_one_that_was_killed() -> None:
    killed = Answer(DaemonAddress("h:1", "rl-trainer", "old", True), 1000.0, error="gone")
    assert trainer_of([killed, answer()]).step == 30


def test_a_document_with_other_things_than_numbers_is_a_reason_and_no_error() -> None:
    trainer = trainer_of([answer(numbers={"step": {"a": 1}, "producer_policy_version": {"p": {"q": 1}}})])
    assert trainer.step is None
    assert "its status document cannot be read" in str(trainer.error)


def test_of_a_producer_that_waits_and_of_no_trainer_little_is_known() -> None:
    said = answer(PRODUCER, not_ready={"trainer": "not connected"}, policy_version=-1)
    for shown in (read([[said]]), read([[answer(), said]])):
        producer = shown.producers[-1]
        assert (producer.not_ready, producer.lag) == ({"trainer": "not connected"}, None)


def test_every_number_of_these_tests_is_declared_by_a_daemon() -> None:
    for job, registry in (("rl-trainer", trainer_registry()), ("rl-producer", producer_registry())):
        families = list(registry.collect())
        names = {family.name for family in families} | {each.name for family in families for each in family.samples}
        prefix = f"{job.replace('-', '_')}_"
        assert SAID[job].numbers.keys() <= {name.removeprefix(prefix).removesuffix("_total") for name in names}


def test_every_field_of_the_view_has_its_number() -> None:
    shown = read([[answer(not_ready={"phase": "x"}), answer(PRODUCER, not_ready={"phase": "x"})]])
    for daemon in (shown.trainer, shown.producers[1]):
        assert daemon is not None
        missing = {name for name, value in msgspec.structs.asdict(daemon).items() if value is None or value == {}}
        assert missing <= {"error", "swap_last_s"}
