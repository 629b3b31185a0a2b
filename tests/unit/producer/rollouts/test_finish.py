"""Rollouts of every source are counted, scored and put together alike."""

import asyncio

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from producer.engine_contract import Completion
from producer.groups import Episode, LeaseFailure, Record, Rollouts
from producer.metrics import Counters, ProducerMetrics
from producer.rewards.pool import RewardFailures, Scored
from producer.rollouts.engine_access import Progress
from producer.rollouts.group import GroupBuilder
from protocol.wire.messages import Group, MissingReward, PolicyInfo
from tests.scripted_trainer import lease


class Rewards:
    """One function, which gives 7, 8, ..."""

    def __init__(self) -> None:
        self.calls = 0

    async def score(self, prompt, completions, completion_ids, columns, *, number, version):
        self.calls += 1
        assert (completions, completion_ids, columns) == (["a", "b"], [[10], [12]], {"answer": "2"})
        return Scored(np.array([[7.0], [8.0]], "f4"), 0.25, RewardFailures(), [[(1, 7.0)], [(1, 8.0)]])


class Setup:
    evaluates: PolicyInfo | None = None

    def __init__(self, columns: tuple[str, ...] = ("computed",), own: tuple[str, ...] = ()) -> None:
        self.rewards, self.counters, self.registry = Rewards(), Counters(), CollectorRegistry()
        self._finish = GroupBuilder(columns, own, self.rewards, self.counters, ProducerMetrics(self.registry))  # type: ignore[arg-type]

    def group(self, own_rewards: list[list[float]], *failures: str, episodes: list[Episode] | None = None) -> Group:
        """Of two episodes, each of which samples one token."""
        if episodes is None:
            episodes = [Episode.of([1], Completion([token], [-0.5], token > 11, [3])) for token in (10, 12)]
        for episode, failure in zip(episodes, failures, strict=False):
            episode.failure = failure
        rollouts = Rollouts(episodes, 1.5, ["a", "b"], np.array(own_rewards, np.float32).reshape(2, -1))
        work = lease(7, evaluates=self.evaluates)
        self.progress = Progress(work)
        return asyncio.run(self._finish.group(work, rollouts, self.progress))

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)


def rewards_of(group: Group) -> list[float]:
    return np.frombuffer(group.rewards, "<f4").tolist()


@pytest.mark.parametrize(
    ("columns", "own", "posted", "expected"),
    [
        (("computed",), (), [[], []], [7, 8]),
        (("computed", "solved"), ("solved",), [[0], [1]], [7, 0, 8, 1]),
        (("solved", "computed", "environment"), ("solved", "environment"), [[0, 5], [1, 6]], [0, 7, 5, 1, 8, 6]),
        (("environment",), ("environment",), [[1], [0]], [1, 0]),
    ],
)
def test_rewards_stand_in_the_order_of_the_file_and_only_missing_columns_are_computed(columns, own, posted, expected):
    setup = Setup(columns, own)
    group = setup.group(posted)
    assert (group.lease_id, group.generation_s) == ("lease-7", 1.5)
    assert rewards_of(group) == expected
    assert setup.rewards.calls == ("computed" in columns)
    assert (setup.progress.stage, setup.progress.reason) == ("scoring", "reward_failed")


def test_spans_are_rewarded_but_not_those_of_failed_episodes():
    for failures, expected in (((), [7, 8]), (("", "it hangs"), [7, 0])):
        group = Setup(("computed", "environment"), ("environment",)).group([[1], [0]], *failures)
        assert np.frombuffer(group.credit, "<f4").tolist() == expected
        assert group.span_ends == bytes([1, expected[1] > 0])


@pytest.mark.parametrize(("is_given", "expected"), [(False, [2.0, 6.5]), (True, [2.0, 1.5])])
def test_a_record_that_loses_its_end_keeps_rewards_of_later_spans_and_not_their_advantages(is_given, expected):
    record = Record.of([1])
    record.sampled(Completion([10, 11, 12, 13], [-0.5] * 4, False, [3] * 4))
    for end, reward in ((2, 2.0), (4, 1.5), (5, 5.0)):
        record.reward(end, reward)
    kept = record.cut(3, is_given=is_given).credit  # within the second span
    assert kept[1:].tolist() == expected
    assert np.isnan(record.cut(2, is_given=True).credit[0])
    assert record.cut(2, is_given=True).credit[1] == 2.0


class Teachers:
    async def scores(self, lease, group):
        assert (lease.lease_id, len(group.completion_ids)) == (group.lease_id, 8)
        if group.credit:
            raise LeaseFailure("generation_failed", "it is down")
        return {"teacher_logprobs": np.array([-0.25, -4.0], "<f4").tobytes(), "teacher_top_ids": b"1234"}


def test_a_teacher_is_asked_for_what_was_put_together_but_not_in_an_evaluation():
    setup = Setup(("environment",), ("environment",))
    setup._finish.teachers = Teachers()
    group = setup.group([[1], [0]])
    assert np.frombuffer(group.teacher_logprobs, "<f4").tolist() == [-0.25, -4.0]
    assert group.teacher_top_ids == b"1234"
    assert (setup.progress.stage, setup.progress.reason) == ("scoring", "generation_failed")
    setup.evaluates = PolicyInfo(3, "ab" * 32, 10)
    assert setup.group([[1], [0]]).teacher_logprobs == b""


def test_a_group_whose_teacher_fails_is_none():
    setup = Setup()
    setup._finish.teachers = Teachers()
    with pytest.raises(LeaseFailure, match="it is down"):
        setup.group([[], []])
    assert setup.counters.groups == 0


def test_what_was_sampled_is_counted_once_without_what_was_shown():
    record = Record.of([1])
    for shown, token_ids in (([50, 51], [10, 11]), ([52], [12])):
        record.sampled(Completion(token_ids, [-0.5] * len(token_ids), False, [3] * len(token_ids)))
        record.show(shown)
    setup = Setup(("environment",), ("environment",))
    setup.group([[1], [0]], episodes=[Episode(1, [record]), Episode.of([1], Completion([13], [-0.5], True, [3]))])
    counters = setup.counters
    assert (counters.groups, counters.completions, counters.truncated) == (1, 2, 1)
    assert (counters.tokens, counters.prompt_tokens) == (4, 1)
    assert setup.value("rl_producer_completion_length_tokens_count") == 2
    assert setup.value("rl_producer_completion_length_tokens_sum") == 4
    assert setup.value("rl_producer_generation_seconds_sum") == 1.5


def test_a_failed_episode_has_no_reward(caplog):
    setup = Setup(("computed", "environment"), ("environment",))
    np.testing.assert_array_equal(rewards_of(setup.group([[0.5], [0.5]], "", "it hangs")), [7, 0.5, np.nan, np.nan])
    assert setup.counters.failed_episodes == 1
    assert setup.group([[0.5], [0.5]], "", "it hangs").missing == (MissingReward("", "environment", "it hangs", (1,)),)
    assert "an episode of prompt 7 failed: it hangs" in caplog.text


def test_where_nothing_is_scored_an_episode_that_failed_costs_only_its_own():
    setup = Setup((), ())
    assert setup.group([[], []], "", "it hangs").rewards == b""
    with pytest.raises(LeaseFailure, match="it hangs too"):
        setup.group([[], []], "it hangs too", "and it")


@pytest.mark.parametrize(
    ("columns", "own", "failures", "num_failed"),
    [
        (("computed", "environment"), [[1], [1]], ("it hangs", "too"), 2),
        (("environment",), [[np.nan], [1]], ("", "it hangs"), 1),
    ],
)
def test_a_group_without_an_episode_that_can_be_scored_is_refused(columns, own, failures, num_failed):
    setup = Setup(columns, ("environment",))
    with pytest.raises(LeaseFailure, match="no episode could be scored: it hangs") as failed:
        setup.group(own, *failures)
    assert failed.value.reason == "environment_failed"
    assert (setup.counters.failed_episodes, setup.counters.groups) == (num_failed, 0)
    assert (setup.counters.tokens, setup.rewards.calls) == (2, 0), "they were sampled all the same"


def test_a_group_that_an_outage_left_without_a_score_is_no_fault_of_its_prompt():
    setup, episodes = Setup((), ()), [Episode.of([1], Completion([13], [-0.5], False, [3])) for _ in range(2)]
    episodes[0].failure, episodes[1].failure, episodes[1].is_outage = "it hangs", "it is down", True
    with pytest.raises(LeaseFailure, match="it is down") as failed:
        setup.group([[], []], episodes=episodes)
    assert failed.value.reason == "generation_failed"


def test_missing_rewards_without_a_failed_episode_are_the_trainers_to_judge():
    group = Setup(("environment",), ("environment",)).group([[np.nan], [np.nan]])
    assert np.isnan(rewards_of(group)).all()


@pytest.mark.parametrize("version", [3, 4])
def test_an_evaluation_is_answered_by_the_version_that_it_names_alone(version):
    setup = Setup()
    setup.evaluates = PolicyInfo(version, "0" * 64, 10)
    if version == 3:
        assert setup.group([[], []]).policy_version == 3
    else:
        with pytest.raises(LeaseFailure, match="v4 is evaluated, and newer weights came in between"):
            setup.group([[], []])
        assert setup.counters.tokens == 0
