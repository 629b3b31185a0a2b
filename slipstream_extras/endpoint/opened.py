"""The endpoint of a producer, from its socket to its answers: `producer.app.endpoint_contract.Endpoint`.

Guarantee: it listens before the engine is loaded, so that a port in use is reported at once.
"""

import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from producer.app.endpoint_contract import Running
from producer.engine_contract import Engine
from producer.engine_gate import EngineGate
from producer.policies.registry import AdapterRegistry
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.leases import RolloutSource
from producer.rollouts.prompts import PromptFormat
from protocol.config.functions import ENVIRONMENT_PLUGINS, load_plugin
from protocol.config.run import RunConfig
from slipstream_extras.endpoint.agent_rollouts import AgentRollouts
from slipstream_extras.endpoint.agents import Agents
from slipstream_extras.endpoint.generation import ServedEngine
from slipstream_extras.endpoint.openai import EndpointPlugin
from slipstream_extras.endpoint.serving import Serving, base_url, listening, read_keys


@contextlib.contextmanager
def open_endpoint(
    config: RunConfig, gpus: list[int], name: str, registry: CollectorRegistry, version: Callable[[], int]
) -> Iterator["OpenedEndpoint"]:
    """Open the socket of the producer `name`, whose engine has the policy `version`. Raises as `listening` and `read_keys`."""
    keys = read_keys(config.serve.api_key_file)
    with listening(config.serve, gpus) as listener:
        yield OpenedEndpoint(config, name, registry, version, listener, keys)


class OpenedEndpoint:
    """The endpoint of the producer `name`."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        registry: CollectorRegistry,
        version: Callable[[], int],
        listener: socket.socket,
        keys: tuple[bytes, ...],
    ) -> None:
        self._config, self._name, self._registry, self._version = config, name, registry, version
        self._listener, self._keys = listener, keys
        self._agents = agents_of(config)
        self._plugin: EndpointPlugin | None = None
        self._serving: Serving | None = None

    @property
    def url(self) -> str:
        return base_url(self._listener)

    @property
    def key(self) -> str:
        return self._keys[0].decode() if self._keys else ""

    @property
    def problem(self) -> str | None:
        return None if self._serving is None else self._serving.problem

    def read_with(self, tokenizer: Any) -> None:
        if self._agents is not None:
            self._agents.read_with(tokenizer)

    def source(self, access: EngineAccess, max_model_len: int) -> RolloutSource | None:
        config = self._config
        if not config.environment.atropos:
            return None
        build = load_plugin(ENVIRONMENT_PLUGINS, config.environment.agent or "", "environment.agent")
        self._plugin = build(config, max_model_len, self._version)
        source: RolloutSource = self._plugin.rollouts(access, config.reward_names)
        return source

    def agent_rollouts(
        self, access: EngineAccess, prompts: PromptFormat, reward_names: tuple[str, ...], environment: str
    ) -> RolloutSource:
        assert self._agents is not None
        return AgentRollouts(self._agents, access, prompts, reward_names, environment)

    def fail_taken(self, reason: str, environment: str) -> None:
        if self._agents is not None:
            self._agents.fail_taken(reason, environment)

    def serving(
        self, engine: Engine, adapters: AdapterRegistry, running: Running, gate: EngineGate
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        config, most = self._config, engine.capabilities.max_num_seqs
        served = ServedEngine(engine.openai_server(config), adapters, most, running, gate)
        self._serving = Serving(config, self._name, self._keys, served, self._registry, self._agents, self._plugin)
        return partial(self._serving.run, self._listener)

    def forget(self) -> None:
        for part in (self._plugin, self._serving.versions if self._serving else None):
            if part is not None:
                part.forget()


def agents_of(config: RunConfig) -> Agents | None:
    """Return the table of tasks for agents; None if no reward is posted."""
    weights = dict(zip(config.reward_names, config.reward_weights, strict=True))
    posted = {
        name: {reward: weights[column] for reward, column in config.posted_by(name).items()}
        for name in config.routes or ("",)
    }
    posted = {name: rewards for name, rewards in posted.items() if rewards}
    return Agents(environments=posted) if posted else None
