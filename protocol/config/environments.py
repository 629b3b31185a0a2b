"""The section `environments`: several environments in one run, by name.

Guarantee: each name that a row, a source or a reward gives is that of an environment, or `single_turn`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from protocol.config.rewards import REWARD_NAME, EnvironmentSection
from protocol.config.section import Label, Problems

COLUMN = "environment"
"""The column of a row that names its environment, as in TRL."""
SINGLE_TURN = "single_turn"
"""The name of no environment: such rows are answered in a single turn."""


def environment_of(columns: Mapping[str, Any]) -> str:
    """Return the name of the environment that plays a row with these columns."""
    return str(columns.get(COLUMN) or SINGLE_TURN)


def _name(value: str) -> str:
    if value in (SINGLE_TURN, REWARD_NAME):
        raise ValueError(f"`{value}` has a meaning of its own; choose another name")
    return value


class NamedEnvironment(EnvironmentSection):
    """An environment with a name. Without `factory` and `agent` it is played by agents of the user's, which post its rewards."""

    name: Annotated[Label, AfterValidator(_name)] = Field(
        description="Its name in `dataset`, in rows, and of its own reward."
    )
    on_failure: Literal["end", "skip"] = Field(
        "end",
        description="`skip`: the run goes on without it once 16 of its prompts in a row, or pipeline.max_failed_share of 64, are "
        "dead letters; --resume tries it again. `end`: they count for the run.",
    )

    def problems(self) -> Problems:
        yield from super().problems()
        if self.atropos:
            yield "agent: environments of Atropos choose their own items and cannot be one of several; use `environment`"
        if self.reward_weight is not None and not self.is_given:
            yield "reward_weight: agents of yours post rewards of rewards.functions; remove it"

    @property
    def key(self) -> str:
        return f"environments.{self.name}"
