"""The options of rewards that Slipstream knows: the built-in functions, reward models and reward services.

Guarantee: options that exist are complete; inconsistent ones are refused with the key and the fix.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from protocol.config.section import Count, Positive, PositiveFloat, PositiveSeconds, Problems, Section, Share


def compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


_Pattern = Annotated[str, AfterValidator(compiled)]


class _Answer(Section):
    column: str = Field(
        "answer",
        description="Column with the right answer, or a list of them: texts or numbers, else the reward is missing.",
    )
    pattern: _Pattern | None = Field(
        None,
        description="Regular expression: only its last match (or the first group) is compared. No match: 0.",
    )
    time_s: PositiveSeconds = Field(1.0, description="Limit per completion; above it the reward is missing.")


class ExactMatch(_Answer):
    """1 if the text is the answer, white space at both ends aside, else 0."""

    ignore_case: bool = Field(False, description="Accept `paris` for `Paris`.")


class NumericMatch(_Answer):
    """1 if the last number of the text is the last number of the answer, else 0."""

    tolerance: Annotated[float, Field(ge=0)] = Field(
        1e-6, description="Difference that still counts as equal, absolute and relative to the answer."
    )


class MathVerify(Section):
    """1 if math-verify finds the text equivalent to the answer, else 0. Needs the extra `math`: `pip install '.[math]'`."""

    column: str = Field("answer", description="As above; LaTeX or numbers.")
    time_s: Annotated[int, Field(ge=1)] = Field(5, description="Limit per completion; above it the reward is missing.")


class ReasoningGym(Section):
    """Score by reasoning-gym of the last `<answer>` or `\\boxed{}` of the text, 0 without one or where it raises. Needs the extra
    `reasoning`."""

    column: str = Field("entry", description="Column with the item, as `dataset.reasoning_gym` writes it.")
    tag: Annotated[str, Field(pattern=r"^[\w-]+$")] = Field("answer", description="Name of the tag around an answer.")
    time_s: PositiveSeconds = Field(5.0, description="Limit per completion; above it the reward is 0.")


class FormatRegex(Section):
    """1 if the text matches the pattern, else 0."""

    pattern: _Pattern = Field(description="Regular expression; `.` matches line breaks too.")
    whole: bool = Field(True, description="The pattern must match the whole text, not a part of it.")
    time_s: PositiveSeconds = Field(1.0, description="Limit per completion; above it the reward is missing.")


class LengthPenalty(Section):
    """-`per_token` for each token of the completion beyond `free_tokens`."""

    per_token: PositiveFloat = Field(0.001, description="Penalty per token.")
    free_tokens: Annotated[int, Field(ge=0, le=2**31)] = Field(0, description="Tokens that cost nothing.")
    at_most: PositiveFloat = Field(1.0, description="Largest penalty of a completion.")


class ReasoningLength(LengthPenalty):
    """Like `length_penalty`, for the tokens of reasoning alone, tags included (`rewards.thinking`)."""


class Code(Section):
    """Runs the Python in a completion (its last fenced block, or all of it) with tests, in a sandbox."""

    column: str = Field(
        "tests",
        description="Column with the tests: Python that raises on errors, a list of such texts, or a list of `{input: "
        "..., output: ...}`. See docs/security.md.",
    )
    score: Literal["all", "share"] = Field(
        "all", description="`all`: 1 if every test passes, else 0. `share`: the share of the tests that pass."
    )
    python: str | None = Field(
        None,
        description="Interpreter, whose packages the code can read. Default: this one, without packages.",
    )
    time_s: PositiveSeconds = Field(5.0, description="Time of one test, on the clock.")
    memory_bytes: Annotated[int, Field(ge=2**24)] = Field(
        256 * 2**20,
        description="Memory of all processes of a test; its /tmp has another quarter.",
    )
    processes: Annotated[int, Field(ge=1, le=4096)] = Field(8, description="Processes and threads of a test at once.")
    parallel: Positive = Field(4, description="Tests that run at once, in each reward worker.")


def _splits(pattern: str) -> str:
    import regex  # only runs with steps pay for it

    try:
        regex.compile(compiled(pattern))
    except regex.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


class Steps(Section):
    pattern: Annotated[str, AfterValidator(_splits)] = Field(
        r"\n\s*\n", description="Regular expression: a match ends a step. `steps: PATTERN` is short for it."
    )
    max_steps: Annotated[int, Field(ge=1, le=4096)] = Field(256, description="The last has the rest of the text.")
    time_s: PositiveSeconds = Field(1.0, description="Limit per completion; above it the reward is missing.")
    reduce: Literal["sum", "mean", "min", "last", "product"] = Field(
        "sum", description="Reward of a completion, by its steps'; an empty one has 0."
    )


def _short(value: Any) -> Any:
    return {"pattern": value} if isinstance(value, str) else value


class _StepReward(Section):
    steps: Annotated[Steps | None, BeforeValidator(_short)] = Field(
        None, description="Score steps, as [spans](algorithms.md#rewards-of-turns-and-spans)."
    )


class _Model(Section):
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    gpu: Count | None = Field(None, description="GPU, counted as for --gpu, with room left for it. Default: the CPU.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Dtype of its weights.")
    max_length: Positive = Field(4096, description="Longest text in tokens; of a longer one the beginning is dropped.")
    batch_size: Positive = Field(8, description="Texts per forward pass.")


class RewardModel(_Model, _StepReward):
    label: int | str = Field(-1, description="With `steps`: label that counts, index or name.")
    value: Literal["probability", "logit"] = Field(
        "probability",
        description="With `steps`: its softmax (of a single label the sigmoid), or its logit.",
    )

    def problems(self) -> Problems:
        for key in () if self.steps else self.model_fields_set & {"label", "value"}:
            yield f"{key} is for steps; set steps, or remove it"


class RewardService(_StepReward):
    headers_env: dict[str, str] = Field(
        default_factory=dict,
        description="Headers of every request, by the environment variable that holds the value: `{Authorization: MY_TOKEN}`.",
    )
    max_answer_bytes: Annotated[int, Field(ge=1024)] = Field(2**20, description="Largest answer that is read.")
    nemo_gym: bool = Field(False, description="`url` is the `/verify` of a resources server of NeMo Gym.")

    def problems(self) -> Problems:
        if self.nemo_gym and self.steps:
            yield "nemo_gym scores completions and no steps; remove one of them"

    @field_validator("headers_env")
    @classmethod
    def _are_headers(cls, values: dict[str, str]) -> dict[str, str]:
        for name in values:
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise ValueError(f"{name!r} is no name of a header, such as Authorization")
        return values


class FeatureMatching(_Model):
    """Nearness of features of a completion in a frozen model to the answer's, less that to the others' (EBFT)."""

    model: str | None = Field(None, description="Frozen model (folder or hub name). Default: the run's base.")
    column: str = Field("answer", description="Column with the text to match, or a list.")
    feature_layers: Annotated[list[Share], Field(min_length=1)] = Field(
        [0.25, 0.5, 0.75], description="Layers, as shares of its depth, rounded up."
    )
    pooling: Literal["last_token", "mean", "completion_mean", "concat"] = Field(
        "last_token", description="Tokens that count; `concat`: those at the quarters."
    )
    whiten: bool = Field(True, description="Whiten features over the group.")
    alignment: Annotated[float, Field(ge=0)] = Field(1.0, description="Weight of nearness to the answer.")
    diversity: Annotated[float, Field(ge=0)] = Field(1.0, description="Weight of nearness to the others.")
    score: Literal["reward", "alignment", "diversity", "distance"] = Field(
        "reward", description="What it returns. Entries that differ only in it share a process."
    )


SHIPPED: dict[str, type[Section]] = {
    "exact_match": ExactMatch,
    "numeric_match": NumericMatch,
    "math_verify": MathVerify,
    "reasoning_gym": ReasoningGym,
    "format_regex": FormatRegex,
    "length_penalty": LengthPenalty,
    "reasoning_length": ReasoningLength,
    "code": Code,
    "feature_matching": FeatureMatching,
}
