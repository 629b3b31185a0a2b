"""The `environment:` section: what a completion of several turns talks to."""

from typing import Any

from pydantic import Field, field_validator

from protocol.config.sections.section import Count, HttpUrl, PlaceAndName, Positive, PositiveSeconds, Problems, Section

REWARD_NAME = "environment"
"""The column of the environment's own reward beside those of the reward functions."""
ATROPOS_ITEMS = "atropos"
"""`dataset.path` of a run whose prompts are the items of environments of Atropos."""

_KINDS = ("factory", "atropos", "verifiers", "nemo_gym")
_OF_A_FACTORY = ("tool_parser", "max_turns", "max_turn_tokens", "call_timeout_s")


class VerifiersSection(Section):
    id: str = Field(
        min_length=1,
        description="An environment of the verifiers library: the name of an installed package, or of a module in the directory "
        "that the producer is started in.",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="For the environment: what its `[env]` block may hold, such as `taskset` and `agent`.",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="The Python that verifiers and the environment are installed in, such as that of a virtual environment. "
        "Default: the producer's own.",
    )


class NemoGymSection(Section):
    url: HttpUrl = Field(description="Agent server of NeMo Gym, whose `/run` does an episode.")

    @field_validator("url")
    @classmethod
    def _without_run(cls, value: str) -> str:
        return value.rstrip("/").removesuffix("/run")


class EnvironmentSection(Section):
    factory: PlaceAndName | None = Field(
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
    verifiers: VerifiersSection | None = Field(
        None, description="An environment of the verifiers library instead; needs `serve.enabled`."
    )
    nemo_gym: NemoGymSection | None = Field(
        None,
        description="An agent of NeMo Gym instead; needs `serve.enabled`, and a `serve.port` that its model server knows.",
    )
    tool_parser: str | None = Field(
        None, description="vLLM's tool-call parser for this model, e.g. `hermes`; needed if the environment has tools."
    )
    reward_weight: float | None = Field(
        None,
        description="Weight of the environment's own reward, which becomes one more reward called `environment`. With a factory "
        "needed exactly if it has `get_reward`; with `verifiers` and `nemo_gym` 1 unless set.",
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
    gpu: Count | None = Field(
        None,
        description="GPU that the environment may use, counted as for --gpu. Each process takes memory of it. Default: "
        "none, also not the engine's.",
    )
    max_concurrent: Positive = Field(
        32,
        description="Episodes that a producer has played at once. With a factory each has a process of its own, started when "
        "needed.",
    )

    def problems(self) -> Problems:
        given = [kind for kind in _KINDS if getattr(self, kind)]
        if len(given) > 1:
            yield f"give one of {', '.join(_KINDS)}; got {' and '.join(given)}"
        for key in _OF_A_FACTORY if self.is_played_outside else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                hint = "; set serve.tool_call_parser" if key == "tool_parser" else ""
                yield f"{key} is for a factory, and {given[0]} has its own ways{hint}; remove it"

    @property
    def is_given(self) -> bool:
        return any(getattr(self, kind) for kind in _KINDS)

    @property
    def is_played_outside(self) -> bool:
        """Whether an agent program plays the episodes through the endpoint (docs/serving.md, "Rollouts from agents")."""
        return self.verifiers is not None or self.nemo_gym is not None

    @property
    def own_weight(self) -> float | None:
        """The weight of the reward called `environment`, or None if there is no such reward."""
        return 1.0 if self.reward_weight is None and self.is_played_outside else self.reward_weight


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
