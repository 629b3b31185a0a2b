"""Every rule: what makes it speak, what leaves it silent, and its words."""

import pytest

from slipstream.status.reading import View
from slipstream.status.warnings import RULES, warnings
from tests.unit.slipstream.status.builders import producer, seen

CASES: dict[str, tuple[View, str, View]] = {  # one that it speaks of, what it says, and one at its threshold
    "dead_reward": (
        seen({"dead_rewards": {"ramp": 12, "exact": 0}}), "the reward ramp gave no number to any completion of 12 groups",
        seen({"dead_rewards": {"ramp": 0}}),
    ),
    "nothing_answers": (seen(), "no daemon of this run answers", seen({})),
    "daemon_gone": (seen({}, producer(error="gone")), "producer p1: gone", seen({}, producer())),
    "not_ready": (
        seen({"not_ready": {"producers": "none is connected"}}), "is not ready (producers: none is connected)",
        seen({"not_ready": {"disk": "99% full"}}, producer()),
    ),
    "nonfinite_steps": (
        seen({"nonfinite_steps": 2}), "2 steps of this process had a NaN or infinite loss or gradient",
        seen({"nonfinite_steps": 0}),
    ),
    "no_progress": (
        seen({"since_last_step_s": 61.0, "step_pace_s": 6.0}), "no step for 61 s, at a pace of one in 6.0 s",
        seen({"since_last_step_s": 61.0, "step_pace_s": 12.3}),
    ),
    "disk_nearly_full": (
        seen({"disk_used_share": 0.91, "disk_limit_share": 0.95}), "the disk of run_dir is 91 % full, leases stop at 95 %",
        seen({"disk_used_share": 0.90, "disk_limit_share": 0.95}),
    ),
    "swaps_refused": (
        seen({}, producer(swaps={"refused": 1})), "producer p1 refused 1 policy version since its start",
        seen({}, producer(swaps={"live": 9, "refused": 0}, refused_version=-1)),
    ),
    "prompts_differ": (
        seen({"prompts_differ": 2}), "2 compared prompts had other tokens at a producer than at the trainer",
        seen({"prompts_differ": 0}),
    ),
    "teacher_failing": (
        seen({}, producer(teacher_failed_shares={"big": 0.5, "old": 0.0})),
        "teacher big fails to score 50 % of the completions of producer p1",
        seen({}, producer(teacher_failed_shares={"big": 0.05})),
    ),
    "heartbeat_stale": (
        seen({}, producer(heard_s=5.6)), "the trainer has not heard producer p1 for 6 s",
        seen({}, producer(heard_s=4.9)),
    ),
    "trainer_starved": (
        seen({"wait_share": 0.61}), "trainer waits 61 % of the time for rollouts",
        seen({"wait_share": 0.5}),
    ),
    "producer_idle": (
        seen({}, producer(idle_share=0.75)), "producer p1 has nothing to do 75 % of the time",
        seen({}, producer(idle_share=0.5)),
    ),
    "staleness_at_bound": (
        seen({"staleness_mean": 1.9, "max_staleness": 2}, producer(idle_share=0.1), producer(idle_share=0.31)),
        "staleness is at its bound, 1.9 of 2 versions",
        seen({"staleness_mean": 1.8, "max_staleness": 2}, producer(idle_share=0.3)),
    ),
    "effective_sample_low": (
        seen({"effective_sample_share": 0.4}), "the effective sample size is 40 % of the tokens",
        seen({"effective_sample_share": 0.5}),
    ),
    "completions_truncated": (
        seen({"truncated_share": 0.3}), "30 % of the completions are cut off",
        seen({"truncated_share": 0.25}),
    ),
    "zero_signal": (
        seen({"zero_signal_share": 0.6}), "60 % of the groups have no signal",
        seen({"zero_signal_share": 0.5}),
    ),
    "environment_skipped": (
        seen({"environment_skipped": {"dice": 0, "maze": 1}}), "goes on without the environment maze",
        seen({"environment_skipped": {"dice": 0, "maze": 0}}),
    ),
    "dead_letters": (
        seen({"dead_letters": 6, "groups_received": {"accepted": 60, "no_signal": 40, "stale": 900}}),
        "6 % of the prompts were given up, 6",
        seen({"dead_letters": 5, "groups_received": {"accepted": 95}}),
    ),
    "connections_refused": (
        seen({"connections_refused": {"unknown_key": 2, "no_key": 0}}),
        "2 connections refused since the trainer's start: unknown key",
        seen({"connections_refused": {"unknown_key": 0}}),
    ),
    "frames_refused": (
        seen({"frames_refused": 3}), "3 frames that came in were no message",
        seen({"frames_refused": 0}),
    ),
}  # fmt: skip


def test_every_rule_has_its_cases() -> None:
    assert list(RULES) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_of_its_trouble_and_of_no_other_and_is_silent_at_its_threshold(name: str) -> None:
    view, text, quiet = CASES[name]
    (warned,) = warnings(view)
    assert warned.name == name
    assert text in warned.text
    assert warned.cure
    assert warnings(quiet) == []


def test_numbers_that_nobody_knows_are_no_trouble() -> None:
    assert warnings(seen({}, producer())) == []


def test_staleness_at_a_bound_that_holds_nobody_back_is_no_trouble() -> None:
    for bound, idle in ((2, 0.2), (2, None), (0, 0.4)):
        assert warnings(seen({"staleness_mean": float(bound), "max_staleness": bound}, producer(idle_share=idle))) == []


def test_a_few_dead_letters_at_the_start_are_no_trouble() -> None:
    assert warnings(seen({"dead_letters": 4, "groups_received": {"accepted": 1}})) == []


@pytest.mark.parametrize(
    ("trainer", "idle", "cure"),
    [
        ({"max_staleness": 2}, 0.1, "add a producer or raise pipeline.max_staleness"),
        ({"max_staleness": 2}, None, "add a producer or raise pipeline.max_staleness"),
        ({"max_staleness": 2}, 0.6, "producers idle too: raise pipeline.max_staleness"),
        (
            {"max_staleness": 0},
            0.6,
            "with pipeline.max_staleness 0 the two take turns; 1 lets them work at the same time",
        ),
    ],
)
def test_the_cure_of_a_starved_trainer_depends_on_what_producers_do(
    trainer: dict, idle: float | None, cure: str
) -> None:
    found = warnings(seen({"wait_share": 0.7} | trainer, producer(idle_share=idle)))
    assert {warned.name: warned.cure for warned in found}["trainer_starved"] == cure


def test_who_takes_turns_on_one_gpu_waits_without_a_warning() -> None:
    turn = {"producers": 1, "changing": 0, "trainer": 0}
    assert warnings(seen({"wait_share": 0.7, "max_staleness": 2, "gpu_turn": turn})) == []


def test_a_full_disk_says_that_no_leases_are_given() -> None:
    (warned,) = warnings(seen({"disk_used_share": 0.96, "disk_limit_share": 0.95}))
    assert warned.text == "the disk of run_dir is 96 % full, no leases are given until there is room"


def test_a_phase_is_waited_for() -> None:
    (warned,) = warnings(seen({"not_ready": {"phase": "loading the model"}}))
    assert (warned.text, warned.cure) == ("the trainer is not ready (loading the model)", "wait")
