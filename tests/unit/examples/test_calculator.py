"""The example's tool, which does to numbers what it says, and nothing to other arguments of the policy's."""

import pytest

from examples.calculator.environment import Calculator


def test_the_tool_multiplies_numbers_alone() -> None:
    assert Calculator().multiply(47, 86) == 4042
    for other in ("ab", [0]):
        with pytest.raises((TypeError, ValueError)):
            Calculator().multiply(other, 10**5)  # type: ignore[arg-type]
