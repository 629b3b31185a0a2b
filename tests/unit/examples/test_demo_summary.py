"""The demo ends with an error where the policy did not learn."""

import pytest

from examples.arithmetic.report import shortfalls

LEARNED = {"eval_before": 0.6, "eval_after": 1.0, "reward_first": 0.5, "reward_last": 0.9}
WELL = LEARNED | {"policy_versions": 40, "overlap_efficiency": 0.98}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, []),
        ({"eval_after": 0.89}, ["eval_after"]),
        ({"eval_before": 0.8}, ["eval_gain"]),
        ({"reward_last": 0.4}, ["reward_gain"]),
        ({"policy_versions": 3, "overlap_efficiency": float("nan")}, ["policy_versions", "overlap_efficiency"]),
    ],
)
def test_what_is_below_the_least_is_named(values: dict[str, float], named: list[str]) -> None:
    assert [text.partition(" ")[0] for text in shortfalls(WELL | values)] == named
