"""TRL's contract of reward functions: what they are passed, what they may return, and what they log."""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from producer.rewards.contract import Logbook, Taken, TrainerState
from producer.rewards.messages import Job, Scores
from producer.rewards.pool import RewardPool, Scored
from producer.rewards.worker import Made, _score
from protocol.errors import ConfigError
from protocol.wire.messages import LOGGED_CHARS, MOST_COLUMNS, MOST_METRICS, Logged, RunPlan
from tests.unit.producer.rewards.test_rewards import COMPLETIONS, IDS, Seen, section, with_pool

REWARDS = """
import functools

def ramp(completions, answer, trainer_state, **kwargs):
    share = trainer_state.global_step / trainer_state.max_steps
    return [share * (c == a) for c, a in zip(completions, answer)]

async def logged(completions, answer, log_extra=None, log_metric=None, **kwargs):
    log_extra("wanted", answer)
    log_metric("accuracy", 0.25)
    log_metric("accuracy", 0.75)
    return [1.0] * len(completions)

async def logged_too(completions, log_metric, environments=None):
    assert environments is None
    log_metric("accuracy", 1.0)
    return (1.0 for _ in completions)

class Judge:
    def __call__(self, completions, *, log_metric, trainer_state):
        log_metric("epoch", trainer_state.epoch)
        return [float(trainer_state.num_train_epochs)] * len(completions)

judge = Judge()

def scaled(factor, completions, log_extra):
    log_extra("scaled", [factor] * len(completions))
    return [factor] * len(completions)

half = functools.partial(scaled, 0.5)

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""
PLAN = RunPlan(max_steps=10, num_epochs=2.0, steps_per_version=2, columns=("answer",))


def scored_by(function: Callable[..., Any]) -> Scores:
    return _score(Made.of(function, "f"), Job("p", COMPLETIONS, IDS, {"answer": "2"}))


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "trl_rewards.py").write_text(REWARDS)
    return lambda name: f"{tmp_path}/trl_rewards.py:{name}"


@pytest.mark.long
def test_a_function_is_passed_the_state_of_its_policy_and_what_it_logs_reaches_the_group(place):
    async def use(pool: RewardPool) -> Scored:
        pool.begin(PLAN)
        return await pool.score("1+1=", COMPLETIONS, IDS, {"answer": "2"}, version=2)

    names = ("ramp", "logged", "logged_too", "judge", "half")
    found = with_pool(section(*map(place, names)), use)
    np.testing.assert_array_almost_equal(found.rewards, [[r, 1, 1, 2, 0.5] for r in (0.0, 0.4, 0.0)])
    assert found.logged.metrics == {"accuracy": pytest.approx(0.75), "epoch": pytest.approx(0.8)}
    assert found.logged.extra == {"wanted": ("2",) * 3, "scaled": ("0.5",) * 3}


@pytest.mark.long
def test_an_argument_that_nothing_passes_is_refused_with_the_columns(place):
    async def use(pool: RewardPool) -> None:
        pool.begin(RunPlan())  # no trainer told of its columns
        pool.begin(PLAN)

    with pytest.raises(ConfigError) as caught:
        with_pool(section(place("half"), place("verl")), use)
    for word in ("verl", "`data_source`, `solution_str`, `ground_truth`", "answer", "completion_ids", "trainer_state"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "fits"), [(None, True), (("answer",), False), (("solution",), True), (("answer", "solution"), True)]
)
def test_a_column_that_an_option_names_is_there_or_refused(columns: tuple[str, ...] | None, fits: bool) -> None:
    pool = RewardPool(section({"function": "exact_match", "options": {"column": "solution"}}), Seen())
    pool._sources[0].workers.columns = [[]]  # as its process says
    refused = pytest.raises(ConfigError, match=r"exact_match .* `solution`.* answer\. Set options\.column")
    with nullcontext() if fits else refused:
        pool.begin(RunPlan(columns=columns))


@pytest.mark.parametrize(
    "returned",
    [
        np.array([0.5, 1.0, 2.0]),
        np.array([0.5, 1.0, 2.0], np.float16),
        torch.tensor([0.5, 1.0, 2.0], requires_grad=True),
        torch.tensor([0.5, 1.0, 2.0], dtype=torch.bfloat16),
        [torch.tensor(0.5, requires_grad=True), torch.tensor([1.0]), np.float64(2)],
        (value for value in (0.5, 1, np.array(2))),
        {"a": 0.5, "b": True, "c": 2}.values(),
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_what_trl_takes_as_rewards_is_taken(returned: Any):
    assert scored_by(lambda **_: returned).rewards == [0.5, 1.0, 2.0]


def test_bools_of_arrays_and_tensors_are_numbers():
    assert scored_by(lambda **_: np.array([True, False, True])).rewards == [1.0, 0.0, 1.0]
    assert scored_by(lambda **_: torch.tensor([True, False, True])).rewards == [1.0, 0.0, 1.0]


def endless():
    while True:
        yield 1.0


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.tensor(1.0), "returned a Tensor"),
        (np.array(1.0), "returned a ndarray"),
        ("111", "returned a str"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned a dict"),
        (endless(), "returned 4 rewards for 3 completions"),
        (np.ones((3, 2)), "reward 0 of type ndarray is no number"),
        (torch.tensor([1.0, math.inf, 1.0]), None),
    ],
)
def test_what_is_no_reward_for_each_completion_is_refused(returned: Any, said: str | None):
    found = scored_by(lambda **_: returned)
    if said is None:
        assert (found.rewards, list(found.failed)) == ([1.0, pytest.approx(math.nan, nan_ok=True), 1.0], [1])
    else:
        assert found.rewards is None
        assert said in found.problem


def test_a_function_without_all_keyword_arguments_gets_those_that_it_takes():
    assert scored_by(lambda completions: [float(len(text)) for text in completions]).rewards == [1.0, 1.0, 3.0]
    assert Taken.by(lambda completions, answer, hint=None: [], "f").columns == ["answer"]


def test_a_decorator_gets_what_it_takes_itself():
    def by_completion(function):
        @functools.wraps(function)
        def rewards(completions, **columns):
            return [function(text) for text in completions]

        return rewards

    @by_completion
    def length(completion):
        return len(completion)

    assert Taken.by(length, "f").columns == []
    assert scored_by(length).rewards == [1.0, 1.0, 3.0]


def test_a_decorator_that_takes_all_needs_a_function_that_does() -> None:
    def timed(function):
        return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))

    assert "Give it **kwargs" in scored_by(timed(lambda completions: [1.0] * 3)).problem
    assert scored_by(timed(lambda completions, **kwargs: [1.0] * 3)).rewards == [1.0] * 3
    assert "Give it" + " **" not in scored_by(lambda completions: completions.missing).problem


def test_a_function_that_takes_arguments_by_position_alone_is_refused():
    with pytest.raises(ConfigError, match="`completions` by its position"):
        Taken.by(lambda completions, /: [], "f")


def test_the_state_is_that_of_the_policy_and_never_beyond_the_end():
    assert TrainerState.of(PLAN, 0) == TrainerState(0, 10, 0.0, 2)
    assert TrainerState.of(PLAN, 3) == TrainerState(6, 10, pytest.approx(1.2), 2)
    assert TrainerState.of(PLAN, 99) == TrainerState(10, 10, pytest.approx(2.0), 2)
    assert TrainerState.of(RunPlan(), 4) == TrainerState()


def test_what_is_logged_has_bounds():
    book = Logbook(2)
    for number in range(MOST_METRICS + 5):
        book.log_metric(f"n{number}", torch.tensor(number))
        book.log_extra(f"c{number}", [number, "x" * 1000])
    book.log_metric("n" * 1000, 1.0)
    book.log_metric("n0", math.nan)
    book.log_metric("n1", 3)
    logged = book.logged
    assert (len(logged.metrics), len(logged.extra)) == (MOST_METRICS, MOST_COLUMNS)
    assert (logged.metrics["n0"], logged.metrics["n1"]) == (0.0, 2.0)
    assert logged.extra["c3"] == ("3", "x" * LOGGED_CHARS)
    assert Logbook(0).logged == Logged()


def test_a_column_that_is_not_one_value_for_each_completion_is_the_functions_mistake():
    def logs(completions, log_extra):
        log_extra("wanted", ["one"])

    assert "log_extra('wanted') has 1 values for 3 completions" in scored_by(logs).problem


def test_text_that_no_message_can_hold_is_replaced():
    book = Logbook(1)
    book.log_extra("half a character \ud800", ["\ud800"])
    book.log_metric("", 1.0)
    assert book.logged == Logged({"-": 1.0}, {"half a character ?": ("?",)})
