"""Builds what answers leases: single turns, environments, agents, and all of them in a run with several environments.

Guarantee: every name that a row may have for its environment has its source, with the pool, the tools and the rewards of that
environment alone.
"""

from collections.abc import Mapping
from typing import Any

from producer.app.endpoint_contract import Endpoint
from producer.engine_contract import Engine
from producer.environments.contract import Environments
from producer.metrics import Counters
from producer.rollouts.chat import ChatFormat
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.leases import RolloutSource
from producer.rollouts.prompts import PromptFormat
from producer.rollouts.routed import RoutedRollouts
from producer.rollouts.several_turns import PlayedRollouts
from producer.rollouts.single_turn import PlainRollouts
from protocol.config.rewards import REWARD_NAME, EnvironmentSection
from protocol.config.run import RunConfig


def build_source(
    config: RunConfig,
    pools: Mapping[str, Environments],
    endpoint: Endpoint | None,
    engine: Engine,
    tokenizer: Any,
    access: EngineAccess,
    counters: Counters,
) -> RolloutSource:
    """Build the source of a run's rollouts; the pools must have started. Raises as `build_chat`."""
    can, template = engine.capabilities, config.dataset.chat_template_kwargs
    of_model: dict[str, Any] = {"placeholders": can.placeholders, "vocab_size": can.vocab_size}
    prompts = PromptFormat(tokenizer, can.facts.max_model_len, template, **of_model)
    sources: dict[str, RolloutSource] = {}
    for name in config.routes or ("",):
        if name in pools:
            section = config.by_environment[name]
            chat = build_chat(config, section, pools[name], engine, tokenizer)
            own = () if section.own_weight is None else (name or REWARD_NAME,)
            sources[name] = PlayedRollouts(access, section, pools[name], chat, counters, own)
        elif posted := tuple(config.posted_by(name).values()):
            assert endpoint is not None  # rules of the configuration
            sources[name] = endpoint.agent_rollouts(access, prompts, posted, name)
        else:
            sources[name] = PlainRollouts(access, prompts)
    if not config.routes:
        return sources[""]
    included = {column for source in sources.values() for column in source.reward_names}
    return RoutedRollouts(sources, tuple(name for name in config.reward_names if name in included))


def build_chat(
    config: RunConfig, section: EnvironmentSection, pool: Environments, engine: Engine, tokenizer: Any
) -> ChatFormat:
    """Return the chat format; the pool must have started. Raises ConfigError if tools do not fit the chat template or the
    engine's parser."""
    tools, parser = pool.tools, None
    if tools:
        assert section.tool_parser is not None
        parser = engine.tool_parser(section.tool_parser, tokenizer, tools)
    can, template = engine.capabilities, config.dataset.chat_template_kwargs
    length, size = can.facts.max_model_len, can.vocab_size
    chat = ChatFormat(tokenizer, length, template, tools, parser, section.key, vocab_size=size)
    chat.check()
    return chat
