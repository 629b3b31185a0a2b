"""The endpoint for clients and agents as a producer knows it. It is an extra.

Guarantee: nothing here knows HTTP or the agents behind it.
"""

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Protocol

from producer.engine_contract import Engine
from producer.engine_gate import EngineGate
from producer.policies.registry import AdapterRegistry
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.leases import RolloutSource
from producer.rollouts.prompts import PromptFormat

Running = Callable[[], AbstractContextManager[None]]


class Endpoint(Protocol):
    """The endpoint of a producer, as the entry point `openai` of the group `slipstream.endpoints` opens it. It listens before the
    engine is loaded, and answers when it has that."""

    @property
    def url(self) -> str:
        """Return the base URL for clients on this host."""

    @property
    def key(self) -> str:
        """Return a key that clients may send; empty where none is needed."""

    @property
    def problem(self) -> str | None:
        """Return why it has ended; None while it has not."""

    def read_with(self, tokenizer: Any) -> None:
        """Take the tokenizer, before the first rollout."""

    def source(self, access: EngineAccess, max_model_len: int) -> RolloutSource | None:
        """Return the source of all rollouts, where clients post whole groups; None where they do not."""

    def agent_rollouts(
        self, access: EngineAccess, prompts: PromptFormat, reward_names: tuple[str, ...], environment: str
    ) -> RolloutSource:
        """Return the source of rollouts that agents play for rows of an environment, and score by these rewards."""

    def fail_taken(self, reason: str, environment: str) -> None:
        """Fail the episodes that agents of an environment have taken, because they are gone."""

    def serving(
        self, engine: Engine, adapters: AdapterRegistry, running: Running, gate: EngineGate
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return the work of answering, which ends when it is cancelled. `running` is entered while a request is in the engine.
        Raises ConfigError for settings that the engine refuses."""

    def forget(self) -> None:
        """Forget what is kept of policies, whose versions now mean other weights."""
