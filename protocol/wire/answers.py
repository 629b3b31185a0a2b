"""The text of a value of a row, as it is compared with a completion and put into a prompt.

Guarantee: a text is itself, to the last space. A number is written in digits, and one without a fraction as the integer that it
is. Anything else is a ValueError that names the column and the value: nothing is compared with Python's notation of a value.
"""

import math
from decimal import Decimal
from typing import Any


def text_of_value(value: Any, column: str) -> str:
    """Return the text of a value of this column."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(repr(value + 0.0)), "f").removesuffix(".0")
    raise ValueError(
        f"column {column!r} has {value!r:.80}, of type {type(value).__name__}; expected a text or a number"
    )


def right_answers(value: Any, column: str) -> list[str]:
    """Return the text of each right answer: of each entry of a list, or of the value itself. A blank text is no answer."""
    answers = [text_of_value(answer, column) for answer in (value if isinstance(value, list) else [value])]
    if not answers or not all(map(str.strip, answers)):
        raise ValueError(f"column {column!r} has {value!r:.80}; expected an answer, or a list of right ones")
    return answers
