"""Options of the rewards that come with Slipstream, `rewards.functions[].builtin`.

Each class here has the options of one function of `producer.rewards.builtin`.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from protocol.config.sections.section import Positive, PositiveFloat, PositiveSeconds, Section


def compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


_Pattern = Annotated[str, AfterValidator(compiled)]


class _Answer(Section):
    column: str = Field("answer", description="Dataset column with the right answer.")
    pattern: _Pattern | None = Field(
        None,
        description="Regular expression: only what its last match says (its first group, if it has one) is looked at. A "
        "completion without a match scores 0.",
    )
    time_s: PositiveSeconds = Field(
        1.0, description="Limit of the pattern per completion; beyond it the reward is missing."
    )


class ExactMatch(_Answer):
    """1 if the text is the answer, white space at both ends aside, else 0."""

    ignore_case: bool = Field(False, description="Whether `Paris` is `paris`.")


class NumericMatch(_Answer):
    """1 if the last number of the text is the last number of the answer, else 0."""

    tolerance: Annotated[float, Field(ge=0)] = Field(
        1e-6, description="Difference that still counts as equal, absolute and relative to the answer."
    )


class MathVerify(Section):
    """1 if math-verify finds the text equivalent to the answer, else 0. Needs the extra `math`: `pip install '.[math]'`."""

    column: str = Field("answer", description="Dataset column with the right answer, as LaTeX or a number.")
    time_s: Annotated[int, Field(ge=1)] = Field(
        5, description="Limit of parsing and of comparing per completion; beyond it the reward is missing."
    )


class FormatRegex(Section):
    """1 if the text matches the pattern, else 0."""

    pattern: _Pattern = Field(description="Regular expression; `.` matches line breaks too.")
    whole: bool = Field(True, description="Whether the whole text has to match, or some part of it.")
    time_s: PositiveSeconds = Field(1.0, description="Limit per completion; beyond it the reward is missing.")


class LengthPenalty(Section):
    """-`per_token` for each token of the completion beyond `free_tokens`."""

    per_token: PositiveFloat = Field(0.001, description="Penalty per token.")
    free_tokens: Annotated[int, Field(ge=0, le=2**31)] = Field(0, description="Tokens that cost nothing.")
    at_most: PositiveFloat = Field(1.0, description="Largest penalty of a completion.")


class ReasoningLength(LengthPenalty):
    """The same of the tokens of reasoning alone, tags included (`rewards.thinking`)."""


class Code(Section):
    """Runs the Python in a completion (its last fenced block, or all of it) with tests, in a sandbox."""

    column: str = Field(
        "tests",
        description="Dataset column with the tests: Python that calls the code's functions and raises where they are wrong, a "
        "list of such texts, or a list of mappings `{input: ..., output: ...}` for programs that read standard input. "
        "docs/security.md, Tests, says what such Python can do.",
    )
    score: Literal["all", "share"] = Field(
        "all", description="`all`: 1 if every test passes, else 0. `share`: the share of the tests that pass."
    )
    python: str | None = Field(
        None,
        description="Interpreter to run, e.g. that of a virtual environment with packages. Its environment is what the code "
        "can read. Default: this one, without packages.",
    )
    time_s: PositiveSeconds = Field(5.0, description="Time of one test, on the clock.")
    memory_bytes: Annotated[int, Field(ge=2**24)] = Field(
        256 * 2**20,
        description="Memory of all processes of a test together; files in its /tmp count extra, up to a quarter. A test in "
        "Python has as much beside it.",
    )
    processes: Annotated[int, Field(ge=1, le=4096)] = Field(8, description="Processes and threads of a test at once.")
    parallel: Positive = Field(4, description="Tests that run at once, in each reward worker.")


SHIPPED: dict[str, type[Section]] = {
    "exact_match": ExactMatch,
    "numeric_match": NumericMatch,
    "math_verify": MathVerify,
    "format_regex": FormatRegex,
    "length_penalty": LengthPenalty,
    "reasoning_length": ReasoningLength,
    "code": Code,
}
