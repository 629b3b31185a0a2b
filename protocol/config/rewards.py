"""The sections that say what a completion is worth: reward functions and environments.

Guarantee: a section that exists is complete; an inconsistent one is refused with its key and the fix.
"""

import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from protocol.config.environment_servers import FACTORIES, SERVERS, SimulatedUserOptions
from protocol.config.functions import ENVIRONMENT_PLUGINS, check_plugin, is_plugin
from protocol.config.mistakes import option_problems
from protocol.config.reward_options import SHIPPED, FeatureMatching, ReasoningLength, RewardModel, RewardService, Steps
from protocol.config.section import (
    Count,
    HttpUrl,
    Positive,
    PositiveSeconds,
    Problems,
    Section,
    place_or_plugin,
)

_KINDS = ("function", "model", "url", "posted")
REWARD_PLUGINS = "slipstream.rewards"
_Function = Annotated[str, place_or_plugin(REWARD_PLUGINS, SHIPPED)]
_SERVICE_RETRIES = 3


class RewardFunction(Section):
    function: _Function | None = Field(
        None,
        description="`module:function` or `file.py:function` with TRL's signature: `def reward(prompts, completions, "
        "completion_ids, trainer_state, log_extra, log_metric, **columns) -> list[float | None]`, also `async`; or a plugin.",
    )
    model: str | None = Field(
        None,
        description="Sequence-classification model with one label (folder or hub name): its logit is the reward.",
    )
    url: HttpUrl | None = Field(None, description="HTTP service that computes rewards.")
    posted: str | None = Field(
        None,
        description="Name of a reward that agents post; all completions then come from agents. See docs/serving.md.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of a plugin, model or url, below.")
    name: str = Field("", description="Name in metrics, logs and journal. Default: derived from what it is.")
    weight: float = Field(1.0, description="Weight in the sum of rewards.")
    timeout_s: PositiveSeconds | None = Field(None, description="Limit of one call. Default: `rewards.timeout_s`.")
    retries: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None,
        description="Further tries after a failed call, with growing pauses. Default: 3 for a url, else 0.",
    )
    concurrency: Positive | None = Field(
        None,
        description="Calls at once, per producer. Default: 8 for a url, 1 for a model, else `rewards.num_workers`, the most.",
    )
    strip_thinking: bool | None = Field(
        None, description="Hide the reasoning of completions from it. Default: `rewards.thinking.strip`."
    )
    environments: list[str] | None = Field(
        None, description="Score only rows of these `environments`; `single_turn`: rows without one. Default: all rows."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_it(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("name"):
            return values
        given = next((str(values[kind]) for kind in _KINDS if values.get(kind)), "")
        place = urlsplit(given) if values.get("url") else None
        last = (place.path.strip("/") or place.hostname or "url") if place else given.rstrip("/")
        return values | {"name": re.sub(r"[^\w.-]", "_", re.split("[/:]", last)[-1])[:64]}

    @field_validator("name")
    @classmethod
    def _is_a_label(cls, value: str) -> str:
        if value and not re.fullmatch(r"[\w.-]{1,64}", value):
            raise ValueError("expected at most 64 letters, digits, `_`, `.` or `-`")
        return value

    def problems(self) -> Problems:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            yield f"give one of {', '.join(_KINDS)}; got {' and '.join(given) or 'none of them'}"
        elif self._schema is not None:
            yield from option_problems(self.function or self.kind, self._schema, self.options)
        elif self.options and not (self.function and is_plugin(self.function)):
            yield "options are for a plugin, model and url; a function of yours takes columns of the dataset"

    @property
    def kind(self) -> str:
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def place(self) -> str:
        return self.function or self.model or self.posted or str(self.url)

    @property
    def settings(self) -> Section | None:
        """The options, if Slipstream knows their names."""
        return None if self._schema is None else self._schema.model_validate(self.options)

    @property
    def _schema(self) -> type[Section] | None:
        if self.function is not None:
            return SHIPPED.get(self.function)
        return RewardModel if self.model is not None else RewardService if self.url is not None else None

    @property
    def steps(self) -> Steps | None:
        """The way it splits completions, if it scores their steps."""
        return getattr(self.settings, "steps", None)

    @property
    def needs_base(self) -> bool:
        return self._schema is FeatureMatching and not self.options.get("model")

    @property
    def is_called(self) -> bool:
        """Return whether it runs in the workers that functions share."""
        return self.function is not None and self._schema is not FeatureMatching

    @property
    def counts_reasoning(self) -> bool:
        return self._schema is ReasoningLength

    def scores(self, environment: str) -> bool:
        """Return whether it scores rows of this environment."""
        return self.environments is None or environment in self.environments

    @property
    def attempts(self) -> int:
        if self.retries is None:
            return 1 + _SERVICE_RETRIES if self.url is not None else 1
        return 1 + self.retries


class ThinkingSection(Section):
    strip: bool = Field(
        False,
        description="Hide the reasoning of completions from rewards; `strip_thinking` overrides it for one reward.",
    )
    open: str = Field(
        "<think>", min_length=1, description="Tag that opens it. The chat template may have written it already."
    )
    close: str = Field("</think>", min_length=1, description="Tag that closes it.")
    unclosed: Literal["missing", "as_is"] | float = Field(
        0.0,
        description="Reward if the reasoning never ends: a number; `as_is`: that of the whole text; `missing`: none.",
    )


class RewardsSection(Section):
    functions: list[RewardFunction] = Field(
        [],
        description="The reward functions; at least one, unless the environment has `get_reward`, or with `distillation.alone`.",
    )
    timeout_s: PositiveSeconds = Field(
        30.0, description="Limit of one call on one group; the worker is then killed and replaced."
    )
    num_workers: Positive = Field(
        2,
        description="Reward worker processes of a producer, for functions and plugins. It scores at most `num_workers` / seconds "
        "per call groups a second.",
    )
    max_memory_bytes: Annotated[int, Field(ge=2**26)] | None = Field(
        4 * 2**30,
        description="Resident memory of a worker with its children; above it the worker is replaced.",
    )
    gpu: Count | None = Field(
        None,
        description="GPU that functions may use, counted as for --gpu. Default: none.",
    )
    credit: Literal["outcome", "per_turn", "per_step", "given"] = Field(
        "outcome",
        description="What credits a token: its completion's reward, or also those of turns, or of spans, from its own on; or "
        "`given`: its span's, as it is. See docs/algorithms.md.",
    )
    gamma: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="Discount of the next turn's or span's reward.")
    outcome_weight: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Weight of the completion's advantage beside these."
    )
    thinking: ThinkingSection = Field(default_factory=lambda: ThinkingSection(), description="Models that think aloud.")

    @field_validator("functions")
    @classmethod
    def _names_differ(cls, functions: list[RewardFunction]) -> list[RewardFunction]:
        names = [function.name for function in functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two reward functions are called {name!r}: metrics need different names; give one a `name`"
                )
        return functions

    def problems(self) -> Problems:
        for key in ("gamma", "outcome_weight") if self.credit in ("outcome", "given") else ():
            if getattr(self, key) != 1.0:
                yield f"{key} is for credit: per_turn or per_step; set credit, or remove it"
        for function in self.functions:
            if function.is_called and (function.concurrency or 0) > self.num_workers:
                yield (
                    f"functions: {function.name} has concurrency: {function.concurrency}, and no more calls than num_workers: "
                    f"{self.num_workers} go on at once; raise num_workers, or remove concurrency"
                )
            if function.steps and self.strips(function):
                yield f"functions: {function.name} scores steps of the whole completion; set its strip_thinking: false"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions in order, which are the columns of every reward array."""
        return tuple(function.name for function in self.functions)

    @property
    def posted(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions if function.posted is not None)

    def computed(self, model: str, revision: str | None) -> "RewardsSection":
        """Return those that producers compute, with this base where they need one and name none."""
        base = {"model": model, "revision": revision}
        functions = [
            function.model_copy(update={"options": base | function.options}) if function.needs_base else function
            for function in self.functions
            if function.posted is None
        ]
        return self.model_copy(update={"functions": functions})

    def strips(self, function: RewardFunction) -> bool:
        return self.thinking.strip if function.strip_thinking is None else function.strip_thinking

    @property
    def counts_reasoning(self) -> bool:
        return any(function.counts_reasoning for function in self.functions)

    @property
    def reads_thinking(self) -> bool:
        """Return whether completions have to be told apart into reasoning and answer."""
        return self.counts_reasoning or any(self.strips(function) for function in self.functions)

    def limit_s(self, function: RewardFunction) -> float:
        return function.timeout_s or self.timeout_s


REWARD_NAME = "environment"
"""The column of the environment's own reward beside those of the reward functions."""
ATROPOS_ITEMS = "atropos"
"""`dataset.path` of a run whose prompts are the items of environments of Atropos."""

_OF_A_FACTORY = ("tool_parser", "max_turns", "max_turn_tokens", "call_timeout_s", "branch_after_turns")
_NEVER_ALIKE = ("simulated_user",)  # factories that do not answer the same turns alike


class AgentOptions(Section):
    """The options of an agent that comes with Slipstream."""

    posts_groups: ClassVar[bool] = False  # whether outside environments post whole groups, and no program is started
    needs_port: ClassVar[bool] = False  # whether a server outside has to know the port of the endpoint

    @property
    def module(self) -> str | None:
        """The module that the agent imports and that the user may have written."""
        return None


class VerifiersOptions(AgentOptions):
    id: str = Field(
        min_length=1,
        description="Name of an installed verifiers environment, or of a module in the producer's folder.",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="For the environment: what its `[env]` block may hold, such as `taskset` and `agent`.",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="The Python that has verifiers and the environment. Default: the producer's.",
    )

    @property
    def module(self) -> str:
        return self.id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


class NemoGymOptions(AgentOptions):
    needs_port = True

    url: HttpUrl = Field(description="Agent server of NeMo Gym, whose `/run` does an episode.")

    @field_validator("url")
    @classmethod
    def _without_run(cls, value: str) -> str:
        return value.rstrip("/").removesuffix("/run")


class AtroposOptions(AgentOptions):
    posts_groups = True


AGENTS: dict[str, type[AgentOptions]] = {
    "verifiers": VerifiersOptions,
    "nemo_gym": NemoGymOptions,
    "atropos": AtroposOptions,
}
_FACTORIES = ("mcp", *FACTORIES)
_Factory = Annotated[str, place_or_plugin(ENVIRONMENT_PLUGINS, _FACTORIES)]


class EnvironmentSection(Section):
    factory: _Factory | None = Field(
        None,
        description="`module:Class` or `file.py:Class` as for TRL's `environment_factory`, `openenv`, or another "
        "plugin (docs/plugins.md). `environment: module:Class` is short for this key.",
    )
    agent: str | None = Field(
        None,
        description="Plugin that plays episodes through the endpoint: `verifiers`, `nemo_gym`, `atropos`, or another. "
        "See docs/environments.md.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the plugin, below.")
    tool_parser: str | None = Field(
        None, description="vLLM's tool-call parser for this model, e.g. `hermes`; needed if the environment has tools."
    )
    reward_weight: float | None = Field(
        None,
        description="Weight of the reward `environment`. Required with `get_reward` beside reward functions, else 1.",
    )
    max_turns: Positive = Field(8, description="Turns of the model in an episode; tool calls of the last are not run.")
    branch_after_turns: Count | Annotated[list[Count], Field(min_length=2, max_length=2)] = Field(
        0,
        description="Turns played once for all completions of a group. `[0, 2]`: drawn for each group.",
    )
    max_turn_tokens: Positive | None = Field(
        None, description="Longest turn, in tokens. Default: what sampling.max_completion_length leaves."
    )
    call_timeout_s: PositiveSeconds = Field(
        30.0, description="Limit of one call of `reset`, a tool or `get_reward`; its process is then killed."
    )
    episode_timeout_s: PositiveSeconds = Field(
        300.0, description="Hard limit of one episode, generation included, from its `reset` on."
    )
    gpu: Count | None = Field(
        None,
        description="GPU that the environment may use, counted as for --gpu. Default: none.",
    )
    max_concurrent: Positive = Field(
        32,
        description="Episodes of a producer at once. With a factory each has a process of its own.",
    )

    @field_validator("agent")
    @classmethod
    def _is_installed(cls, value: str | None) -> str | None:
        if value in FACTORIES:
            raise ValueError(f"{value} is an environment.factory")
        if value is not None:
            check_plugin(
                ENVIRONMENT_PLUGINS, value, (*AGENTS, *_FACTORIES), "A class of yours is an environment.factory"
            )
        return value

    def problems(self) -> Problems:
        yield from self._branch_problems()
        if self.factory and self.agent:
            yield "give one of factory and agent"
        elif schema := (AGENTS | FACTORIES).get(self.agent or self.factory or ""):
            yield from option_problems(str(self.agent or self.factory), schema, self.options)
            limit_s = self.options.get("timeout_s", SimulatedUserOptions.model_fields["timeout_s"].default)
            if schema is SimulatedUserOptions and isinstance(limit_s, int | float) and limit_s >= self.call_timeout_s:
                yield f"call_timeout_s: {self.call_timeout_s:g} ends a reply before options.timeout_s={limit_s:g} does; raise it"
        elif self.options and not self.agent and not (self.factory and is_plugin(self.factory)):
            yield "options are for a plugin; remove them"
        for key in _OF_A_FACTORY if self.is_played_outside else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                hint = "; set serve.tool_call_parser" if key == "tool_parser" else ""
                yield f"{key} is for a factory, and {self.agent} decides that itself{hint}; remove it"

    def _branch_problems(self) -> Problems:
        least, most = self.trunk_turns
        if least == most == 0:
            return
        if self.factory is None and not self.is_played_outside:
            others = f"{self.agent} decides that itself" if self.agent else "agents of yours decide that themselves"
            yield f"branch_after_turns is for a factory, and {others}; remove it"
        elif self.factory in _NEVER_ALIKE:
            yield (
                f"branch_after_turns: {self.factory} answers the same turns otherwise, and trunks are played again; remove it"
            )
        elif least > most:
            yield f"branch_after_turns: the range {self.branch_after_turns} ends before it begins; give [least, most]"
        elif most >= self.max_turns:
            yield (
                f"branch_after_turns: {most} turns of a trunk leave none of max_turns={self.max_turns}; lower one or raise the "
                "other"
            )

    @property
    def trunk_turns(self) -> tuple[int, int]:
        """The fewest and the most turns of a trunk."""
        turns = self.branch_after_turns
        return (turns, turns) if isinstance(turns, int) else (turns[0], turns[1])

    @property
    def key(self) -> str:
        """The section's name, for messages."""
        return "environment"

    @property
    def is_given(self) -> bool:
        return bool(self.factory or self.agent)

    @property
    def agent_options(self) -> AgentOptions:
        """The options of the agent that Slipstream knows; those of other plugins are their own."""
        schema = AGENTS.get(self.agent or "")
        return schema.model_validate(self.options) if schema else AgentOptions()

    @property
    def atropos(self) -> bool:
        """Return whether outside environments post groups of their own items."""
        return AGENTS.get(self.agent or "", AgentOptions).posts_groups

    @property
    def is_played_outside(self) -> bool:
        """Return whether an agent program plays the episodes through the endpoint (docs/serving.md, "Rollouts from agents")."""
        return self.agent is not None and not self.atropos

    @property
    def own_weight(self) -> float | None:
        """The weight of the reward called `environment`, or None if there is no such reward."""
        has_reward = self.is_played_outside or self.factory in SERVERS
        return 1.0 if self.reward_weight is None and has_reward else self.reward_weight


def with_only_reward(values: Any) -> Any:
    """Let the reward of an environment's class count where nothing else could score its episodes."""
    if not isinstance(values, dict) or values.get("environments"):
        return values
    environment = values.get("environment")
    environment = {"factory": environment} if isinstance(environment, str) else environment
    others = (values.get("rewards"), "functions"), (values.get("distillation"), "alone")
    if any(isinstance(section, dict) and section.get(key) for section, key in others):
        return values
    if not isinstance(environment, dict) or environment.get("factory") in (None, *_FACTORIES):
        return values
    return values | {"environment": {"reward_weight": 1.0} | environment}


def with_atropos(values: Any) -> Any:
    """Add what follows from `environment.agent: atropos`: no dataset, the scores as the one reward, no rerolls."""
    environment = values.get("environment") if isinstance(values, dict) else None
    if not isinstance(environment, dict) or environment.get("agent") != "atropos":
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
