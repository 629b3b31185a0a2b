"""Episodes become a group on the wire: what all records begin with is its prompt, and only sampled tokens have log-probs."""

import numpy as np
import pytest

from producer.engine_contract import Completion
from producer.groups import Episode, LeaseFailure, Record, common_length, group_message
from protocol.wire.messages import Group
from replay.groups import GroupShape, RolloutGroup

SHAPE = GroupShape(num_generations=2, num_rewards=1, max_completion_length=6, vocab_size=50)
REWARDS = np.array([[1.0], [np.nan]], np.float32)


def record(prompt: list[int], *parts: list[int] | tuple[list[int], int]) -> Record:
    """Parts that the policy sampled come with its version; log-probs are a hundredth of the token."""
    result = Record.of(prompt)
    for part in parts:
        if isinstance(part, list):
            result.show(part)
        else:
            ids, version = part
            result.sampled(Completion(ids, [-token / 100 for token in ids], False, [version] * len(ids)))
    return result


def episode(*records: Record, truncated: bool = False) -> Episode:
    return Episode(2, list(records), truncated=truncated)


def message(*episodes: Episode) -> Group:
    return group_message("lease-1", list(episodes), REWARDS, SHAPE.max_completion_length, 0.5, 0.25)


def parsed(*episodes: Episode) -> RolloutGroup:
    return SHAPE.parse(message(*episodes))


def test_turns_and_tool_results_are_stitched_in_order() -> None:
    group = parsed(
        episode(record([1, 2], ([10, 11], 3), [20, 21], ([12], 4))),
        episode(record([1, 2], ([13], 3)), truncated=True),
    )
    assert group.prompt_ids.tolist() == [1, 2]
    assert group.completion_ids.tolist() == [10, 11, 20, 21, 12, 13]
    assert group.completion_lengths.tolist() == [5, 1]
    np.testing.assert_allclose(group.logprobs, [-0.1, -0.11, 0, 0, -0.12, -0.13], rtol=1e-6)
    assert group.is_sampled.tolist() == [True, True, False, False, True, True]
    assert group.versions.tolist() == [3, 3, 3, 3, 4, 3]
    assert (group.policy_version, group.newest_version) == (3, 4)
    assert group.truncated.tolist() == [False, True]
    assert group.episodes is None
    np.testing.assert_array_equal(group.rewards, REWARDS)


def test_a_fork_is_one_more_record_of_its_episode() -> None:
    forked = episode(record([1, 2], ([10, 11], 3)), record([1, 2, 30, 31], ([12], 5)))
    group = parsed(forked, episode(record([1, 2], ([13], 3))))
    assert group.completion_of.tolist() == [0, 0, 1]
    assert group.completion_ids.tolist() == [10, 11, 30, 31, 12, 13]
    assert group.is_sampled.tolist() == [True, True, False, False, True, True]
    assert group.versions.tolist() == [3, 3, 5, 5, 5, 3]
    assert forked.token_ids == [30, 31, 12]


def test_prompts_that_differ_begin_where_they_differ_and_sampled_tokens_are_never_prompt() -> None:
    group = parsed(episode(record([1, 2, 3], ([10], 3))), episode(record([1, 2, 4, 5], ([10], 3))))
    assert group.prompt_ids.tolist() == [1, 2]
    assert group.completion_ids.tolist() == [3, 10, 4, 5, 10]
    assert group.is_sampled.tolist() == [False, True, False, False, True]
    plain = episode(record([1, 2], ([10, 11], 3)))
    assert parsed(plain, plain).prompt_ids.tolist() == [1, 2]
    alike = message(plain, plain)
    assert (alike.sampled, alike.episodes, alike.token_versions) == (b"", b"", b"")


def test_a_record_that_is_too_long_behind_the_common_prompt_loses_its_end() -> None:
    long = record([1, 2, 3, 4], ([10], 3), [20, 21, 22], ([11, 12], 3))
    group = parsed(episode(long), episode(record([1, 2, 5], ([13], 3))))
    assert group.completion_lengths.tolist() == [3, 2], "3, 4 and 10; what a tool said is no end"
    assert group.truncated.tolist() == [True, False]


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (([1], [2]), "no token in common"),
        (([1, *range(2, 9)], [1, 9]), "differ by more than sampling.max_completion_length"),
    ],
)
def test_prompts_that_make_no_group_are_refused(prompts: tuple[list[int], list[int]], said: str) -> None:
    with pytest.raises(LeaseFailure, match=said):
        message(*(episode(record(prompt, ([10], 3))) for prompt in prompts))


def test_common_length() -> None:
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length("ab", "abc") == common_length("abc", "ab") == 2
    assert common_length([], [1]) == 0
