"""The `rewards:` section: what scores a completion.

Guarantee: every function has a name of its own, and only options that its kind takes.
"""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from protocol.config.sections.builtin_rewards import SHIPPED
from protocol.config.sections.section import Count, HttpUrl, PlaceAndName, Positive, PositiveSeconds, Problems, Section

_KINDS = ("function", "builtin", "model", "url", "posted")
_SERVICE_RETRIES = 3


class RewardModel(Section):
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    gpu: Count | None = Field(
        None, description="GPU to run on, counted as for --gpu. Leave room for it there. Default: the CPU."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Dtype of its weights.")
    max_length: Positive = Field(4096, description="Longest text in tokens; of a longer one the beginning is dropped.")
    batch_size: Positive = Field(8, description="Texts per forward pass.")


class RewardService(Section):
    headers_env: dict[str, str] = Field(
        default_factory=dict,
        description="Headers of every request, by the environment variable that holds the value: `{Authorization: MY_TOKEN}`.",
    )
    max_answer_bytes: Annotated[int, Field(ge=1024)] = Field(2**20, description="Largest answer that is read.")

    @field_validator("headers_env")
    @classmethod
    def _are_headers(cls, values: dict[str, str]) -> dict[str, str]:
        for name in values:
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise ValueError(f"{name!r} is no name of a header, such as Authorization")
        return values


class RewardFunction(Section):
    function: PlaceAndName | None = Field(
        None,
        description="`module:function` or `file.py:function` with TRL's signature: "
        "`def reward(prompts, completions, completion_ids, **columns) -> list[float | None]`; may be `async`.",
    )
    builtin: str | None = Field(None, description="One of those that come with Slipstream, by name. See below.")
    model: str | None = Field(
        None,
        description="Sequence-classification model with one label, a local folder or a hub name: its logit is the reward.",
    )
    url: HttpUrl | None = Field(None, description="HTTP service that is asked for rewards. See below.")
    posted: str | None = Field(
        None,
        description="What outside agents post under this name, for completions that they generate through `serve:`. With one, "
        "all completions of the run come from agents. See docs/serving.md.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of a builtin, model or url. See below.")
    name: str = Field("", description="Name in metrics, logs and journal. Default: derived from what it is.")
    weight: float = Field(1.0, description="Weight in the sum of rewards.")
    timeout_s: PositiveSeconds | None = Field(None, description="Limit of one call. Default: `rewards.timeout_s`.")
    retries: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None,
        description="Further tries after a call that failed, with growing pauses. After the last one the reward is missing. "
        f"Default: {_SERVICE_RETRIES} for a url, else 0.",
    )
    concurrency: Positive | None = Field(
        None,
        description="Calls at once, per producer. Default: 8 for a url, 1 for a model (each further one is another process with "
        "the model in it), else `rewards.num_workers`.",
    )
    strip_thinking: bool | None = Field(
        None, description="Whether it sees completions without their reasoning. Default: `rewards.thinking.strip`."
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

    @field_validator("builtin")
    @classmethod
    def _is_shipped(cls, value: str | None) -> str | None:
        if value is not None and value not in SHIPPED:
            raise ValueError(f"there is no {value!r}; there are {', '.join(SHIPPED)}")
        return value

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
        if self.kind in ("function", "posted"):
            if self.options:
                yield "options are for builtin, model and url; a function takes columns of the dataset"
            return
        try:
            self.settings  # noqa: B018 - validates
        except ValidationError as error:
            problems = "; ".join(
                f"options.{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
                for e in error.errors()
            )
            yield f"{problems}. {self.builtin or self.kind} takes {', '.join(self._schema.model_fields)}"

    @property
    def kind(self) -> str:
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def place(self) -> str:
        return self.function or self.builtin or self.model or self.posted or str(self.url)

    @property
    def settings(self) -> Section:
        return self._schema.model_validate(self.options)

    @property
    def _schema(self) -> type[Section]:
        if self.builtin is not None:
            return SHIPPED[self.builtin]
        return RewardModel if self.model is not None else RewardService

    @property
    def counts_reasoning(self) -> bool:
        return self.builtin == "reasoning_length"

    @property
    def attempts(self) -> int:
        if self.retries is None:
            return 1 + _SERVICE_RETRIES if self.url is not None else 1
        return 1 + self.retries


class ThinkingSection(Section):
    strip: bool = Field(
        False,
        description="Whether rewards see completions without their reasoning; `strip_thinking` decides for one of them.",
    )
    open: str = Field(
        "<think>", min_length=1, description="Tag that opens it. The chat template may have written it already."
    )
    close: str = Field("</think>", min_length=1, description="Tag that closes it.")
    unclosed: Literal["missing", "as_is"] | float = Field(
        0.0,
        description="Reward of a completion whose reasoning never ends, from the functions that see none: a number; `as_is`: "
        "that of the whole text; `missing`: none, and the completion is left out of its group.",
    )


class RewardsSection(Section):
    functions: list[RewardFunction] = Field(
        [], description="The reward functions; at least one, unless the environment has `get_reward`."
    )
    timeout_s: PositiveSeconds = Field(
        30.0, description="Hard limit of one call of one function on one group; the worker is then killed and replaced."
    )
    num_workers: Positive = Field(2, description="Reward worker processes of a producer, for functions and builtins.")
    max_memory_bytes: Annotated[int, Field(ge=2**26)] | None = Field(
        4 * 2**30,
        description="Resident memory of one such worker with its children; beyond it the worker is killed and replaced.",
    )
    gpu: Count | None = Field(
        None,
        description="GPU that functions may use, counted as for --gpu. Each worker takes memory of it. Default: none, "
        "also not the engine's.",
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

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions in order, which are the columns of every reward array."""
        return tuple(function.name for function in self.functions)

    @property
    def posted(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions if function.posted is not None)

    @property
    def computed(self) -> "RewardsSection":
        functions = [function for function in self.functions if function.posted is None]
        return self.model_copy(update={"functions": functions})

    def strips(self, function: RewardFunction) -> bool:
        return self.thinking.strip if function.strip_thinking is None else function.strip_thinking

    @property
    def counts_reasoning(self) -> bool:
        return any(function.counts_reasoning for function in self.functions)

    @property
    def reads_thinking(self) -> bool:
        """Whether completions have to be told apart into reasoning and answer."""
        return self.counts_reasoning or any(self.strips(function) for function in self.functions)

    def limit_s(self, function: RewardFunction) -> float:
        return function.timeout_s or self.timeout_s
