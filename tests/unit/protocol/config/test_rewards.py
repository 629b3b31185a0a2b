"""What an entry of `rewards.functions` may be. What is refused is in the table of refusals."""

import pytest

from protocol.config.rewards import RewardFunction, RewardsSection


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"function": "a/b.py:exact"}, "exact"),
        ({"function": "exact_match"}, "exact_match"),
        ({"function": "exact_match", "name": "city"}, "city"),
        ({"model": "org/Reward-7B"}, "Reward-7B"),
        ({"model": "models/my reward/"}, "my_reward"),
        ({"url": "http://127.0.0.1:8000/v1/judge"}, "judge"),
        ({"url": "https://judge.example"}, "judge.example"),
    ],
)
def test_every_kind_has_a_name(entry, name):
    assert RewardFunction.model_validate(entry).name == name


def test_defaults_follow_the_kind_and_the_section():
    section = RewardsSection.model_validate(
        {
            "functions": [
                {"function": "a:b"},
                {"url": "http://x/y"},
                {"function": "code", "timeout_s": 60, "retries": 0},
            ],
            "timeout_s": 7,
        }
    )
    assert [function.attempts for function in section.functions] == [1, 4, 1]
    assert [section.limit_s(function) for function in section.functions] == [7, 7, 60]
    assert [section.strips(function) for function in section.functions] == [False] * 3
