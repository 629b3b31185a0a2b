"""Rollouts of several turns: every completion is an episode, in which the policy and an environment take turns until one of
them, or a limit, ends it.

Guarantee: the policy goes on from the very tokens that it sampled (`producer.rollouts.chat`); no record is longer than
`sampling.max_completion_length` after its episode's first prompt; an episode whose environment fails, or that takes longer than
it may, keeps its tokens and the reason for its failure. An episode without a sampled token is played again, a few times; then its
group fails. So it does at once if the trunk that it is to branch from fails. An outage of the environment's is no fault of the
prompt.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from producer.environments.contract import EnvironmentFailedError, Environments, Session
from producer.groups import Episode, LeaseFailure, Record, Rollouts
from producer.metrics import Counters
from producer.rollouts.branching import Branch, Place, RecordedSession, trunk_turns
from producer.rollouts.chat import ChatFormat, Continuation, assistant_message, tool_message
from producer.rollouts.engine_access import EngineAccess, Progress
from producer.rollouts.in_flight import Sample
from producer.rollouts.prompts import malformed
from protocol.config.rewards import EnvironmentSection
from protocol.runtime.logs import Throttle
from protocol.wire.messages import Lease, Sampling, is_conversational

logger = logging.getLogger(__name__)

_RESETS = 3  # before the group fails
_RESET_PAUSE_S = 0.5  # before the second attempt; twice as long before the third


@dataclass
class PlayedRollouts:
    """A `RolloutSource`, for a run with `environment.factory`. `reward_names` has the environment's own reward, if there is
    one."""

    access: EngineAccess
    section: EnvironmentSection
    pool: Environments
    chat: ChatFormat
    counters: Counters
    reward_names: tuple[str, ...]
    _warn: Throttle = field(default_factory=partial(Throttle, logger))

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        if not is_conversational(lease.prompt):
            raise malformed(lease.prompt, "an environment needs")
        try:
            async with self.access.enter(lease, progress) as sample:
                started = time.monotonic()
                branch = await self._branch(lease, sample)
                play = partial(self._play, lease, sample, branch)
                async with asyncio.TaskGroup() as group:
                    plays = [self._episode(play) for _ in range(lease.sampling.num_generations)]
                    tasks = [group.create_task(each) for each in plays]
                    for task in tasks:
                        task.add_done_callback(lambda _: progress.end_episode())
        except ExceptionGroup as errors:  # what is no failure of the lease ends the daemon, whatever failed before it
            raise next(
                (e for e in errors.exceptions if not isinstance(e, LeaseFailure)), errors.exceptions[0]
            ) from None
        generation_s = time.monotonic() - started
        episodes = [task.result() for task in tasks]
        own = [[episode.reward] for episode in episodes] if self.reward_names else [[]]
        return Rollouts(episodes, generation_s, [episode.messages for episode in episodes], np.array(own, np.float32))

    async def _branch(self, lease: Lease, sample: Sample) -> Branch | None:
        """Play the trunk of a group and return the last place before which the policy took a turn there, at most as many turns
        after the prompt as are wanted. Return None if that is the prompt."""
        num_turns, branches = trunk_turns(self.section, lease), list[Branch]()
        if not num_turns:
            return None
        trunk = await self._episode(partial(self._play_trunk, lease, sample, num_turns, branches))
        self.counters.tokens += trunk.num_sampled
        if trunk.failure:
            self.counters.failed_episodes += 1
            raise LeaseFailure(trunk.failure_reason, f"the trunk of the group failed: {trunk.failure}")
        branch = branches[-1]
        if branch.place.turn == 1:
            return None
        self.counters.branched_groups += 1
        self.counters.trunk_tokens += len(branch.token_ids) - branch.prompt_length
        self.counters.trunk_saved_tokens += branch.num_sampled * (lease.sampling.num_generations - 1)
        return branch

    async def _play_trunk(
        self,
        lease: Lease,
        sample: Sample,
        num_turns: int,
        branches: list[Branch],
        environment: Session,
        episode: Episode,
    ) -> None:
        recorded = RecordedSession(environment)
        place: Place | None = await self._begin(lease, recorded, episode)
        branches.clear()
        while place is not None:
            branches.append(Branch.at(self.section.key, place, episode, recorded))
            if len(branches) > num_turns:
                break
            place = await self._take_turn(lease.sampling, sample, recorded, episode, place)

    async def _episode(self, play: Callable[[Session, Episode], Awaitable[None]]) -> Episode:
        limit_s = self.section.episode_timeout_s
        for attempt in range(_RESETS):
            await asyncio.sleep(attempt * _RESET_PAUSE_S)
            episode = Episode(0, [])
            try:
                async with self.pool.session() as environment, asyncio.timeout(limit_s) as limit:
                    await play(environment, episode)
            except TimeoutError:
                if not limit.expired():
                    raise
                episode.failure = (
                    f"an episode was not over within {self.section.key}.episode_timeout_s={limit_s:g} seconds"
                )
            except EnvironmentFailedError as error:
                episode.failure, episode.is_outage = str(error), error.is_outage
            ended = (record.cut(len(record.token_ids)) for record in episode.records)
            episode.records = [record for record in ended if record.token_ids]
            if episode.records:
                return episode
            self.counters.failed_episodes += 1
        raise LeaseFailure(episode.failure_reason, episode.failure)

    async def _play(
        self, lease: Lease, sample: Sample, branch: Branch | None, environment: Session, episode: Episode
    ) -> None:
        begin = partial(self._begin, lease) if branch is None else branch.begin
        place: Place | None = await begin(environment, episode)
        while place is not None:
            place = await self._take_turn(lease.sampling, sample, environment, episode, place)
        if self.reward_names:
            try:
                episode.reward = await environment.reward()
            except EnvironmentFailedError as error:
                self._warn("reward", f"the environment's reward is missing: {error}")

    async def _begin(self, lease: Lease, environment: Session, episode: Episode) -> Place:
        observation = await environment.reset(lease.columns | {"prompt": lease.prompt}, lease.prompt_id)
        if environment.done:
            self._warn(
                "done", f"{self.section.key}: `done` is true right after `reset`, so no call of the first turn is run"
            )
        messages = _with_observation(lease.prompt, observation)
        text = await self.chat.in_thread(self.chat.prompt, messages)
        prompt_ids = await self.chat.in_thread(self.chat.token_ids, text)
        what = "the prompt with tools and what `reset` returned"
        self.chat.check_tokens(prompt_ids, lease.sampling.max_completion_length, what)
        episode.prompt_length = len(prompt_ids)
        episode.records.append(Record.of(prompt_ids))
        return Place(1, messages, len(messages), text)

    async def _take_turn(
        self, sampling: Sampling, sample: Sample, environment: Session, episode: Episode, place: Place
    ) -> Place | None:
        """Play a turn and what answers it. Return the place before the next one, None if the episode is over."""
        messages = list(place.messages)
        ended_by, calls = await self._turn(sampling, sample, episode, messages, place.num_calls)
        episode.messages = messages[place.num_given :]
        is_last = place.turn == self.section.max_turns
        answers = await self._answers(environment, episode, calls, place.num_calls, is_last=is_last)
        await self._reward_turn(environment, episode.records[-1])
        if is_last or environment.done or not answers:
            return None
        messages += answers
        try:
            following = await self.chat.in_thread(self.chat.go_on, place.text, messages, len(answers), ended_by)
        except LeaseFailure as failure:  # the template took the prompt, and refuses what was said since
            raise EnvironmentFailedError(failure.detail) from failure
        if not await self._continue(episode, following, sampling.max_completion_length):
            episode.truncated = True
            return None
        episode.messages = messages[place.num_given :]
        return Place(place.turn + 1, messages, place.num_given, following.text, place.num_calls + len(calls))

    async def _reward_turn(self, environment: Session, record: Record) -> None:
        """Put the reward of the turn with which the record ends on its last token."""
        weight = 1.0 if self.section.own_weight is None else self.section.own_weight
        if self.pool.rewards_turns and weight and (reward := await environment.turn_reward()) is not None:
            record.reward(len(record.token_ids), weight * reward)

    async def _turn(
        self, sampling: Sampling, sample: Sample, episode: Episode, messages: list[dict[str, Any]], num_calls: int
    ) -> tuple[str, list[Any]]:
        """Sample one turn and add its message. Returns the token that ended it, and the calls that are to be answered."""
        record = episode.records[-1]
        room = sampling.max_completion_length + episode.prompt_length - len(record.token_ids)
        limit = min(room, self.section.max_turn_tokens or room)
        (completion,) = await sample(
            list(record.token_ids), msgspec.structs.replace(sampling, num_generations=1, max_completion_length=limit)
        )
        record.sampled(completion)
        self.counters.turns += 1
        if completion.truncated:
            content = await self.chat.in_thread(self.chat.text, completion.token_ids)
            messages.append(assistant_message(content, [], num_calls))
            episode.truncated = True
            return "", []
        *said, end = completion.token_ids
        content, calls = await self.chat.in_thread(self.chat.parse, said)
        messages.append(assistant_message(content, [(call.name, call.arguments or {}) for call in calls], num_calls))
        return await self.chat.in_thread(self.chat.end_of_turn, end), calls

    async def _answers(
        self, environment: Session, episode: Episode, calls: list[Any], num_calls: int, *, is_last: bool
    ) -> list[dict[str, Any]]:
        """Return the messages that answer the episode's last turn: results of its calls, or a reply, also to the last turn. No
        call is run after one that ended the episode."""
        if not calls and self.pool.replies and not episode.truncated:
            return await environment.reply(episode.messages[-1]["content"])
        answers = []
        for place, call in enumerate([] if is_last else calls):
            if not environment.done:
                answers.append(await self._answer(environment, call, num_calls + place))
        return answers

    async def _answer(self, environment: Session, call: Any, number: int) -> dict[str, Any]:
        self.counters.tool_calls += 1
        content: str | list[Any]
        if call.arguments is None:
            problem = "The arguments are no JSON object that can be sent."
            content, failed = str({"error": problem}), True
        else:
            content, failed = await environment.call(call.name, call.arguments)
        self.counters.failed_tool_calls += failed
        return tool_message(call.name, content, number)

    async def _continue(self, episode: Episode, following: Continuation, max_completion_length: int) -> bool:
        """Add what the policy is shown next; False if that leaves it no room for a token."""
        limit = episode.prompt_length + max_completion_length
        record = episode.records[-1]
        if following.token_ids is None:
            token_ids = await self.chat.in_thread(self.chat.token_ids, following.text)
            if len(token_ids) >= limit:
                return False
            episode.records.append(Record.of(token_ids))
        elif len(record.token_ids) + len(following.token_ids) >= limit:
            return False
        else:
            record.show(following.token_ids)
        return True


def _with_observation(prompt: list[dict[str, Any]], observation: str | list[Any] | None) -> list[dict[str, Any]]:
    """The prompt with what `reset` returned at the end of its last message."""
    messages = list(prompt)
    if observation is None:
        return messages
    content = messages[-1]["content"]
    if not isinstance(content, str | list):
        raise malformed(
            prompt, "an environment whose `reset` returns something adds it to the last message, which needs a content:"
        )
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    messages[-1] = messages[-1] | {"content": content + observation}
    return messages
