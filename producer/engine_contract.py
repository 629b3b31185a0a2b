"""Types that the parts of a producer hand each other.

Guarantee: nothing here imports a library, so every part can be tested with stand-ins for the others.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from protocol.config.functions import load_plugin
from protocol.config.run import RunConfig
from protocol.wire.messages import EngineFacts, Sampling
from protocol.wire.model_folder import ANY_SIZE


class EngineSteps(NamedTuple):
    """Totals over the steps of an engine: their number, the tokens that they computed, the sequences that they sampled for, and
    how many of them used a CUDA graph. None stands for what the engine does not tell."""

    number: int | None = None
    tokens: int | None = None
    sequences: int | None = None
    with_graph: int | None = None


UNTOLD = EngineSteps()


@dataclass(frozen=True)
class EngineLoad:
    """Last report of vLLM's scheduler, how often it has preempted a request since it started, and its steps. Requests that came
    since the report are waiting."""

    kv_cache_usage: float  # share of the blocks, from 0 to 1
    running: int  # requests, of which a group has one per completion
    waiting: int
    preemptions: int
    steps: EngineSteps = UNTOLD


@dataclass(frozen=True)
class Adapter:
    """A policy version as the engine knows it. Name, id and path belong to this load alone (see `AdapterRegistry`). `checksum` is
    the CRC-32 of its two files as they were published; with None they are taken as they are."""

    version: int
    name: str
    id: int
    path: Path
    checksum: int | None = None


@dataclass(frozen=True)
class Completion:
    """Sampled tokens (with the end-of-sequence token, if it was sampled), and of each its log-prob and the policy version
    that sampled it. One that was `cut` has not ended."""

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool
    token_versions: list[int]
    cut: bool = False


class ToolCall(NamedTuple):
    """A call that the model asks for. `arguments` is None where they are no JSON object."""

    name: str
    arguments: dict[str, Any] | None


class AdapterRefusedError(Exception):
    """The engine is alive, but does not take this adapter."""


class AdapterFailedError(AdapterRefusedError):
    """The engine could not take this adapter now, for a reason that may pass, such as a full disk."""


class Scored(NamedTuple):
    """An engine's numbers of a row of tokens: the log-prob of each but the first, and of tokens that may come next, `sampled` as
    a rollout gets them and `rescored` without the prefix cache (both empty where they were not asked for). `cached` counts the
    tokens of the row whose keys and values the first request of this version found in the prefix cache."""

    logprobs: list[float]
    sampled: list[float] = []  # noqa: RUF012 - of a NamedTuple
    rescored: list[float] = []  # noqa: RUF012
    cached: int = 0


NUM_SAMPLED = 8  # tokens after each row
Rows = Sequence[Sequence[int]]


class ToolParser(Protocol):
    def parse(self, token_ids: list[int]) -> tuple[str, list[ToolCall]]:
        """Content and tool calls of what the model sampled."""


class PolicyWeights(Protocol):
    """Policies in an engine. Each is loaded, may be verified, and is then activated or discarded. An active policy is discarded
    when no request names it any more. `survival` is the share of the last policy's update that rounding to the engine's dtype has
    left, by the last part of modules' names and of `all`. It is empty where nothing is rounded."""

    survival: dict[str, float]

    async def load(self, adapter: Adapter) -> dict[str, float] | None:
        """Read a policy into the engine, while requests run, and compare what each worker then holds with the published files,
        bit by bit. A server in another process has no bits to read: its policies are proved by the probe alone. Return the
        seconds of each phase, where there are several. Raises AdapterRefusedError if the policy cannot be read, or is not held;
        nothing has changed then."""

    async def verify(self, adapter: Adapter | None, rows: Rows) -> list[Scored]:
        """Compute the log-probs of rows of tokens, as much of each as fits, with a loaded policy, or with the base (None). Raises
        AdapterRefusedError if it does not score them, or has no base any more."""

    def activate(self, adapter: Adapter) -> None:
        """Allow requests on this policy."""

    async def discard(self, adapter: Adapter) -> None:
        """Unload a policy. One that was not activated is undone, as if it had never been loaded."""


def most_groups(max_num_seqs: int, group_size: int) -> int:
    """Return how many groups keep an engine of so many places full: one more than fits, so that places freed by short completions
    are filled at once."""
    return max_num_seqs // group_size + 1


@dataclass(frozen=True)
class EngineCapabilities:
    """Facts and abilities of an engine, which do not change while it lives. An engine that `holds_versions` has several policies
    at a time, and each request stays on the one that it began on. In any other, a new policy replaces the former one under the
    requests that run. Its model has embeddings of `vocab_size` tokens, of which `placeholders` stand for images or videos. An
    engine that `can_sleep` can leave its GPU to others for a while."""

    facts: EngineFacts
    tokenizer_folder: Path
    max_num_seqs: int
    holds_versions: bool = True
    placeholders: frozenset[int] = frozenset()
    vocab_size: int = ANY_SIZE
    can_sleep: bool = False


class Engine(Protocol):
    """Interface of an engine, in this process or elsewhere. Every call to a dead engine raises EngineError."""

    capabilities: EngineCapabilities

    @property
    def weights(self) -> PolicyWeights: ...

    async def warm_up(self) -> None:
        """Called once, before anything else."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event
    ) -> list[Completion]:
        """Sample a group until every completion has ended, or `cut` is set. Raises LeaseFailure if the engine refuses this
        request."""

    async def score(self, token_ids: list[int], adapter: Adapter) -> list[float]:
        """Return the log-prob of each token but the first, at temperature 1. Raises LeaseFailure if the engine refuses this
        request."""

    async def sleep(self) -> None:
        """Give up the memory of its GPU, but keep its policies. Call it only while no request is open; the next may come
        when `wake` has returned. Raises EngineError if it cannot."""

    async def wake(self) -> None:
        """Take the memory again. Raises EngineError if there is none."""

    def tool_parser(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> "ToolParser":
        """The parser `name` of tool calls, for these tools. Raises ConfigError if there is none."""

    def openai_server(self, config: RunConfig) -> Any:
        """Return the server of OpenAI requests on this engine, a `slipstream_extras.endpoint.openai.Answering`."""

    def current_load(self) -> EngineLoad | None:
        """Return the load at the last engine step; None with `engine.disable_log_stats`."""

    def watch_load(self, look: Callable[[], None]) -> None:
        """Call `look` after each report of the load."""

    def outage(self) -> str | None:
        """Return why the engine cannot generate for now, None if it can. Requests wait until the outage passes by itself."""

    def check_alive(self) -> None:
        """Raise EngineError if the engine is dead, also while it has no requests."""

    def note_end(self) -> None:
        """Called before `shutdown` if the run is finished."""

    def shutdown(self) -> None:
        """End the engine. What is asked of it from then on is an `EngineError`."""


@dataclass(frozen=True)
class EnginePlugin:
    """An engine outside of this process, as an entry point of the group `slipstream.engines` offers it."""

    open: Callable[[RunConfig], AbstractAsyncContextManager[Engine]]


def engine_plugin(config: RunConfig) -> EnginePlugin | None:
    """Load the plugin that this run's engine comes from; None if the producer runs vLLM itself."""
    if config.engine_server is None:
        return None
    plugin: EnginePlugin = load_plugin("slipstream.engines", config.engine_server.plugin, "engine_server.plugin")
    return plugin
