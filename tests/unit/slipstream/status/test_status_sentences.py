"""The three sentences on a run: each says what is known, and no more."""

from slipstream.run_reader import Ended
from slipstream.status.sentences import sentences
from slipstream.status.warnings import Warned
from tests.unit.slipstream.status.builders import seen


def said(*warned: Warned, **of_the_view: object) -> list[str]:
    return sentences(seen(**of_the_view), warned)


def test_a_run_that_goes_on() -> None:
    trainer = {"step": 40, "max_steps": 60, "eta_s": 90.0, "wait_share": 0.25, "evaluation_score": 0.5}
    rewards = {step: step / 64 for step in range(1, 33)}
    progress, learning, trouble = said(trainer=trainer, rewards=rewards)
    assert progress == "The run is at step 40 of 60, with about 90 s left."
    assert learning == "Its reward rose from 0.070 to 0.445 over steps 1 to 32 (means of 8); held out it scores 0.500."
    assert trouble == "There is nothing to warn of; the trainer waits 25 % of the time."


def test_the_best_and_the_worst_of_several_sources() -> None:
    trainer = {"source_reward": {"sums": 0.75, "products": 0.25, "words": 0.5}}
    rewards = {step: step / 64 for step in range(1, 33)}
    told = said(trainer=trainer, rewards=rewards)[1]
    assert "sums has most, 0.750, and products least, 0.250" in told
    assert "sources" not in said(trainer={"source_reward": {"sums": 0.75}}, rewards=rewards)[1]


def test_a_reward_that_falls_or_stays() -> None:
    for sign, way in ((-1, "fell"), (0, "stayed")):
        assert f"reward {way} from" in said(rewards={step: sign * step / 32 for step in range(32)})[1]


def test_before_there_is_anything_to_say() -> None:
    progress, learning, _ = said(trainer={"address": "127.0.0.1:1"})
    assert progress == "There is no step yet."
    assert learning == "There is no reward yet."
    assert "too few steps" in said(rewards={1: 0.5})[1]


def test_where_teachers_alone_teach_they_are_told_of() -> None:
    taught = {"address": "127.0.0.1:1", "teacher_logprob_gain": -0.25}
    assert said(trainer=taught)[1] == "Its tokens are 0.250 nats less likely to its teachers than to itself."
    assert "reward" in said(trainer=taught, rewards={1: 0.5})[1]


def test_an_end_and_its_warnings() -> None:
    progress, _, trouble = said(
        Warned("nothing_answers", "the run was stopped", "rl-trainer --resume goes on"),
        Warned("zero_signal", "half", "other prompts"),
        trainer=None,
        ended=Ended(7, False, 0.0),
    )
    assert progress.startswith("The run stopped at step 7, ")
    assert trouble == "The run was stopped, the first of 2 warnings: rl-trainer --resume goes on."
