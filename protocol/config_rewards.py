"""The `rewards:` section: what scores a completion.

Guarantee: as `protocol.config`.
"""

from pydantic import Field, field_validator

from protocol.config_section import Positive, PositiveSeconds, Section, place_and_name


class RewardFunction(Section):
    function: str = Field(
        description="`module:function` or `file.py:function` with TRL's signature: "
        "`def reward(prompts, completions, completion_ids, **columns) -> list[float | None]`."
    )
    weight: float = Field(1.0, description="Weight in the sum of rewards.")

    @field_validator("function")
    @classmethod
    def _has_both_parts(cls, value: str) -> str:
        return place_and_name(value)

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]


class RewardsSection(Section):
    functions: list[RewardFunction] = Field(min_length=1, description="The reward functions.")
    timeout_s: PositiveSeconds = Field(
        30.0, description="Hard limit of one call of one function on one group; the worker is then killed and replaced."
    )
    num_workers: Positive = Field(2, description="Reward worker processes of a producer.")

    @field_validator("functions")
    @classmethod
    def _names_differ(cls, functions: list[RewardFunction]) -> list[RewardFunction]:
        names = [f.name for f in functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward functions are called {name!r}: metrics need different names")
        return functions

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions, in order: the columns of every reward array."""
        return tuple(function.name for function in self.functions)
