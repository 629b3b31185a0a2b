"""Every reason has a class, every class its delays."""

from typing import get_args

import pytest

from protocol.wire.messages import FailureReason
from replay.prompt_table import RetryBudget, failure_class, is_hopeless


def test_every_reason_has_the_class_it_should() -> None:
    refusals = set(get_args(FailureReason)) - {"returned"}  # that is no failure
    reasons = refusals | {"invalid", "expired", "released"}  # these are the trainer's own
    classes = {reason: (failure_class(reason), is_hopeless(reason)) for reason in reasons}
    assert classes == {
        "prompt_too_long": ("data", True),
        "bad_prompt": ("data", True),
        "reward_failed": ("data", False),
        "environment_failed": ("data", False),
        "generation_failed": ("infra", False),
        "no_policy": ("infra", False),
        "invalid": ("infra", False),
        "expired": ("infra", False),
        "released": ("infra", False),
    }


@pytest.mark.parametrize(
    ("backoff_s", "delays"),
    [
        (1.0, [1, 2, 4, 8, 16, 32, 60, 60]),
        (0.25, [0.25, 0.5, 1, 2, 4, 8, 16, 32, 60]),
        (90.0, [60, 60]),
        (0.0, [0, 0]),
    ],
)
def test_delays_double_up_to_a_minute(backoff_s: float, delays: list[float]) -> None:
    budget = RetryBudget(10, backoff_s)
    assert [budget.delay_s(failures) for failures in range(1, len(delays) + 1)] == delays
