"""The `environment:` section: what a completion of several turns talks to.

Guarantee: as `protocol.config`.
"""

from typing import Any

from pydantic import Field, field_validator

from protocol.config_section import Positive, PositiveSeconds, Section, place_and_name

REWARD_NAME = "environment"
"""The column of `get_reward` beside those of the reward functions."""
ATROPOS_ITEMS = "atropos"
"""`dataset.path` of a run whose prompts are the items of environments of Atropos."""


class EnvironmentSection(Section):
    factory: str | None = Field(
        None,
        description="`module:Class` or `file.py:Class` (or a function that makes one) by the conventions of TRL's "
        "`environment_factory`: `reset`, public methods as tools, optionally `get_reward`. `environment: module:Class` is "
        "short for this key alone. Default: none, completions have one turn.",
    )
    atropos: bool = Field(
        False,
        description="Environments of Atropos generate through `serve:`, and post scored groups, which are what is trained. Their "
        "items take the place of `dataset:`, their scores that of `rewards:`. See docs/environments.md.",
    )
    tool_parser: str | None = Field(
        None, description="vLLM's tool-call parser for this model, e.g. `hermes`; needed if the environment has tools."
    )
    reward_weight: float | None = Field(
        None,
        description="Weight of the environment's `get_reward`, which becomes one more reward called `environment`. Needed "
        "exactly if it has that method.",
    )
    max_turns: Positive = Field(
        8, description="Turns of the model in one episode; the tools it asks for in the last are not run."
    )
    max_turn_tokens: Positive | None = Field(
        None, description="Longest turn, in tokens. Default: what sampling.max_completion_length leaves."
    )
    call_timeout_s: PositiveSeconds = Field(
        30.0, description="Hard limit of one call of `reset`, a tool or `get_reward`; its process is then killed."
    )
    episode_timeout_s: PositiveSeconds = Field(
        300.0, description="Hard limit of one episode, generation included, from its `reset` on."
    )
    max_concurrent: Positive = Field(
        32, description="Environments that a producer runs at once, each in a process of its own, started when needed."
    )

    @field_validator("factory")
    @classmethod
    def _has_both_parts(cls, value: str | None) -> str | None:
        return None if value is None else place_and_name(value)


def with_atropos(values: Any) -> Any:
    """What follows from `environment.atropos`: no dataset, the scores as the one reward, no rerolls of placeholders."""
    environment = values.get("environment") if isinstance(values, dict) else None
    if not isinstance(environment, dict) or environment.get("atropos") is not True:
        return values
    derived: dict[str, dict[str, Any]] = {
        "environment": {"reward_weight": 1.0},
        "dataset": {"path": ATROPOS_ITEMS},
        "reroll": {"max_attempts": 0},
    }
    given = {name: values.get(name) or {} for name in derived}
    return values | {
        name: defaults | given[name] if isinstance(given[name], dict) else given[name]
        for name, defaults in derived.items()
    }
