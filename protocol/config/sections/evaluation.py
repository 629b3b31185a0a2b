"""The `evaluation:` section: a held-out set that the producers score every so many versions."""

from typing import Annotated

from pydantic import Field

from protocol.config.sections.dataset import DatasetSection
from protocol.config.sections.section import Positive, PositiveSeconds, Problems, Section

WEIGHTED_SUM = "reward"
"""The metric that is the weighted sum of all reward functions."""


class EvaluationSection(Section):
    dataset: DatasetSection = Field(
        description="The held-out prompts, with the keys of `dataset`. They are asked in order; their prompts are rendered with "
        "the training dataset's `chat_template_kwargs`."
    )
    every_versions: Positive = Field(
        50, description="Evaluate every so many policy versions, and the last one of the run."
    )
    before_training: bool = Field(True, description="Evaluate version 0, which is where training starts.")
    max_prompts: Positive | None = Field(None, description="Ask the first so many prompts only. null: all.")
    num_completions: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="Completions per prompt.")
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0, description="0 is greedy, and takes one completion per prompt."
    )
    metric: str = Field(
        WEIGHTED_SUM,
        description="What a completion is worth: the name of a reward function, or `reward`, the weighted sum of all.",
    )
    threshold: float | None = Field(
        None,
        description="A completion worth at least this much passes, and the score is pass@k. null: the score is the mean worth.",
    )
    pass_k: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="The k of pass@k, at most `num_completions`. docs/algorithms.md has the estimator."
    )
    keep_best: bool = Field(True, description="Keep the adapter with the best score in `checkpoints/best`.")
    patience: Positive | None = Field(
        None,
        description="The run ends, as finished, after so many evaluations in a row without improvement. null: never.",
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="A score counts as improvement, for `patience`, when it is more than this above the best one."
    )
    wait_s: PositiveSeconds = Field(
        600.0,
        description="How long the end of the run waits for the last evaluation without an answer coming in.",
    )
    hold_swap_s: PositiveSeconds = Field(
        60.0,
        description="With `swap.mode: merged`: how long a producer keeps the weights that are evaluated when newer ones have "
        "arrived. What is not answered by then is not scored.",
    )

    def problems(self) -> Problems:
        if self.temperature == 0 and self.num_completions > 1:
            same = f"num_completions={self.num_completions} at temperature 0 would all be the same"
            yield f"{same}; set num_completions: 1, or a temperature"
        if self.pass_k > self.num_completions:
            yield f"pass_k={self.pass_k} needs at least so many num_completions, not {self.num_completions}"
        if self.pass_k > 1 and self.threshold is None:
            yield f"pass_k={self.pass_k} needs a threshold, above which a completion passes"

    @property
    def score_name(self) -> str:
        """What the score is, in words: scores of the same name can be compared."""
        return (
            f"mean {self.metric}" if self.threshold is None else f"pass@{self.pass_k} {self.metric}>={self.threshold:g}"
        )
