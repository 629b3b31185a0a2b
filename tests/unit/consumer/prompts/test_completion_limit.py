"""A row's completions may be as long as the row says, and never longer than those of the run."""

from typing import Any

import pytest

from consumer.prompts.completion_limit import CompletionLimit
from protocol.config.data import SamplingSection
from protocol.errors import DatasetError
from protocol.wire.messages import Sampling

LIMIT = CompletionLimit.of_run(SamplingSection(max_completion_length=8, max_completion_length_column="limit"))


@pytest.mark.parametrize(
    ("columns", "limit"),
    [
        ({"limit": 3}, 3),
        ({"limit": "3"}, 3),
        ({"limit": 3.0}, 3),
        ({"limit": 9}, 8),
        ({"limit": None}, 8),
        ({"limit": ""}, 8),
        ({}, 8),
    ],
)
def test_the_limit_of_a_row(columns: dict[str, Any], limit: int) -> None:
    assert LIMIT.of(columns) == limit
    sampling = Sampling(4, 8, 0.5, stop=("x",))
    assert LIMIT.within(sampling, columns) == Sampling(4, limit, 0.5, stop=("x",))
    assert CompletionLimit(None, 8).of(columns) == 8


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many", [3], {}])
def test_what_is_no_limit_is_named(value: Any) -> None:
    with pytest.raises(DatasetError, match=r"max_completion_length_column: 'limit' has .*; expected an integer from 1"):
        LIMIT.of({"limit": value})
