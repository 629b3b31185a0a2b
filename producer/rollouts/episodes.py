"""Completions of several turns: the policy and an environment take turns until one of them, or a limit, ends the episode.

Guarantee: the policy goes on from the very tokens that it sampled (`producer.rollouts.chat`); no record is longer than
`sampling.max_completion_length` after its episode's first prompt; an episode whose environment fails, or that takes longer than
it may, keeps what was sampled and is not scored. A group fails only if an episode of it never began, or none can be scored.
"""

import asyncio
import copy
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.environments.pool import EnvironmentFailedError, EnvironmentPool, EnvironmentSession
from producer.groups import Episode, Record
from producer.interfaces import Adapter, Completion, Counters, LeaseFailure, ToolParser
from producer.rollouts.chat import ChatFormat, Continuation, assistant_message, tool_message
from producer.rollouts.in_flight import InFlight
from protocol.config.environment import EnvironmentSection
from protocol.config.run import RunConfig
from protocol.throttle import Throttle
from protocol.wire.messages import Lease, Sampling
from protocol.wire.prompts import is_conversational

logger = logging.getLogger(__name__)

_RESETS = 3  # before the group fails

Busy = Callable[[], AbstractContextManager[None]]
Sample = Callable[[list[int], Sampling], Awaitable[Completion]]


class Episodes:
    """Plays the episodes of leases.

    Args:
        parser: None if the environment has no tools.
        decode: token ids to text.
        needs_functions: whether reward functions score episodes, too.
    """

    def __init__(
        self,
        section: EnvironmentSection,
        pool: EnvironmentPool,
        in_flight: InFlight,
        chat: ChatFormat,
        parser: ToolParser | None,
        decode: Callable[[list[int]], str],
        max_model_len: int,
        counters: Counters,
        *,
        needs_functions: bool = True,
    ) -> None:
        self.needs_functions = needs_functions
        self._section = section
        self._pool = pool
        self._in_flight = in_flight
        self._chat = chat
        self._parser = parser
        self._decode = decode
        self._max_model_len = max_model_len
        self._counters = counters
        self._warn = Throttle(logger)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        pool: EnvironmentPool,
        in_flight: InFlight,
        tokenizer: Any,
        max_model_len: int,
        counters: Counters,
        build_parser: Callable[[str, Any, list[dict[str, Any]]], ToolParser],
    ) -> "Episodes":
        """Those of a run.

        Args:
            pool: started.
            build_parser: of its name, the tokenizer and the tools.

        Raises:
            ConfigError: tools do not go with the model's chat template, or with vLLM's parser.
        """
        tools, parser = pool.description.tools, None
        chat = ChatFormat(tokenizer, tools, config.dataset.chat_template_kwargs)
        chat.check()
        if tools:
            assert config.environment.tool_parser is not None
            parser = build_parser(config.environment.tool_parser, tokenizer, tools)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        return cls(
            config.environment, pool, in_flight, chat, parser, decode, max_model_len, counters,
            needs_functions=bool(config.rewards.functions),
        )  # fmt: skip

    def check(self, lease: Lease) -> None:
        """Raises:
        LeaseFailure: the prompt is no list of messages.
        """
        if not is_conversational(lease.prompt):
            raise LeaseFailure(
                "bad_prompt",
                "an environment needs a list of messages such as {'role': 'user', 'content': '...'}, got "
                f"{type(lease.prompt).__name__}: {str(lease.prompt)[:80]}",
            )

    async def play(self, lease: Lease, adapter: Adapter | None, busy: Busy) -> list[Episode]:
        """All episodes of a group. Only after `AdapterRegistry.wait_for`.

        Args:
            adapter: the one to stay on, pinned by the caller; None: the newest.
            busy: entered while a request is in the engine.

        Raises:
            LeaseFailure: an episode did not begin, or none of them can be scored.
            EngineError: the engine is dead.
        """
        try:
            with self._in_flight.kept() as kept:
                async with asyncio.TaskGroup() as group:
                    plays = [self._episode(lease, adapter or kept, busy) for _ in range(lease.sampling.num_generations)]
                    tasks = [group.create_task(play) for play in plays]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        episodes = [task.result() for task in tasks]
        if all(episode.failure for episode in episodes):
            raise LeaseFailure("environment_failed", episodes[0].failure)
        return episodes

    def with_own_rewards(self, rewards: NDArray[np.float32], episodes: list[Episode]) -> NDArray[np.float32]:
        """Of the reward functions (n, F), with the environment's own beside them, if it has any; NaN where there is none to be
        had, everywhere of an episode that failed."""
        rewards = rewards.reshape(len(episodes), -1).copy()
        if self._section.reward_weight is not None:
            own = [math.nan if episode.reward is None else episode.reward for episode in episodes]
            rewards = np.column_stack([rewards, np.array(own, np.float32)])
        rewards[[bool(episode.failure) for episode in episodes]] = math.nan
        return rewards

    async def _episode(self, lease: Lease, adapter: Adapter | None, busy: Busy) -> Episode:
        for _ in range(_RESETS):
            episode = Episode(0, [])
            async with self._pool.session() as environment:
                try:
                    async with asyncio.timeout(self._section.episode_timeout_s):
                        await self._play(lease, partial(self._sample, adapter, busy), environment, episode)
                except TimeoutError:
                    limit = f"environment.episode_timeout_s={self._section.episode_timeout_s:g} seconds"
                    episode.failure = f"an episode was not over within {limit}"
                except EnvironmentFailedError as error:
                    episode.failure = str(error)
            if episode.failure:
                self._counters.failed_episodes += 1
                self._warn("episode", f"an episode of prompt {lease.prompt_id} failed: {episode.failure}")
            for record in episode.records:
                record.cut(len(record.token_ids))
            episode.records = [record for record in episode.records if record.token_ids]
            if episode.records:
                return episode
        raise LeaseFailure("environment_failed", episode.failure)

    async def _sample(
        self, adapter: Adapter | None, busy: Busy, token_ids: list[int], sampling: Sampling
    ) -> Completion:
        with busy():
            if adapter is None:
                (completion,) = await self._in_flight.sample(token_ids, sampling)
            else:
                (completion,) = await self._in_flight.sample_on(token_ids, sampling, adapter)
        return completion

    async def _play(self, lease: Lease, sample: Sample, environment: EnvironmentSession, episode: Episode) -> None:
        messages = _with_observation(lease.prompt, await environment.reset(lease.columns | {"prompt": lease.prompt}))
        text, first = self._chat.prompt(messages), len(messages)
        prompt_ids = self._chat.encode(text)
        self._check_room(len(prompt_ids), lease.sampling.max_completion_length)
        episode.prompt_length = len(prompt_ids)
        episode.records.append(Record.of(prompt_ids))
        num_calls = 0
        for turn in range(1, self._section.max_turns + 1):
            ended_by, calls = await self._turn(lease.sampling, sample, episode, messages, num_calls)
            episode.messages = messages[first:]
            if not calls or turn == self._section.max_turns:
                break
            answers = [await self._answer(environment, call, num_calls + place) for place, call in enumerate(calls)]
            num_calls += len(answers)
            messages += answers
            following = self._chat.go_on(text, messages, len(answers), ended_by)
            if not self._continue(episode, following, lease.sampling.max_completion_length):
                episode.truncated = True
                break
            text, episode.messages = following.text, messages[first:]
        if self._section.reward_weight is not None:
            episode.reward = await self._reward(environment)

    async def _turn(
        self, sampling: Sampling, sample: Sample, episode: Episode, messages: list[dict[str, Any]], num_calls: int
    ) -> tuple[str, list[Any]]:
        """Samples one turn and adds its message. Returns the token that ended it, and the calls that are to be answered."""
        record = episode.records[-1]
        room = sampling.max_completion_length + episode.prompt_length - len(record.token_ids)
        limit = min(room, self._section.max_turn_tokens or room)
        completion = await sample(
            list(record.token_ids), msgspec.structs.replace(sampling, num_generations=1, max_completion_length=limit)
        )
        record.sampled(completion)
        self._counters.turns += 1
        if completion.truncated:
            messages.append(assistant_message(self._decode(completion.token_ids), [], num_calls))
            episode.truncated = True
            return "", []
        *said, end = completion.token_ids
        content, calls = (self._decode(said), []) if self._parser is None else self._parser.parse(said)
        messages.append(assistant_message(content, [(call.name, call.arguments or {}) for call in calls], num_calls))
        return self._chat.end_of_turn(end), calls

    async def _answer(self, environment: EnvironmentSession, call: Any, number: int) -> dict[str, Any]:
        self._counters.tool_calls += 1
        content: str | list[Any]
        if call.arguments is None:
            content, failed = str({"error": "The arguments are not a JSON object."}), True
        else:
            content, failed = await environment.call(call.name, call.arguments)
        self._counters.failed_tool_calls += failed
        return tool_message(call.name, content, number)

    def _continue(self, episode: Episode, following: Continuation, max_completion_length: int) -> bool:
        """Adds what the policy is shown next; False if that leaves it no room for a token."""
        limit = episode.prompt_length + max_completion_length
        record = episode.records[-1]
        if following.token_ids is None:
            token_ids = self._chat.encode(following.text)
            if len(token_ids) >= limit:
                return False
            episode.records.append(Record.of(token_ids))
        elif len(record.token_ids) + len(following.token_ids) >= limit:
            return False
        else:
            record.show(following.token_ids)
        return True

    async def _reward(self, environment: EnvironmentSession) -> float | None:
        try:
            return await environment.reward()
        except EnvironmentFailedError as error:
            self._warn("reward", f"the environment's reward is missing: {error}")
            return None

    def _check_room(self, num_tokens: int, max_completion_length: int) -> None:
        room = self._max_model_len - max_completion_length
        if num_tokens > room:
            raise LeaseFailure(
                "prompt_too_long",
                f"the prompt with tools and what `reset` returned has {num_tokens} tokens, but engine.max_model_len="
                f"{self._max_model_len} less sampling.max_completion_length={max_completion_length} leaves {room}",
            )


def _with_observation(prompt: list[dict[str, Any]], observation: str | list[Any] | None) -> list[dict[str, Any]]:
    """The prompt with what `reset` returned at the end of its last message."""
    messages = copy.deepcopy(prompt)
    if observation is None:
        return messages
    content = messages[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    messages[-1] = messages[-1] | {"content": content + observation}
    return messages
