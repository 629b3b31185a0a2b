"""Rollouts of a single turn.

Guarantee: a group has as many completions as its lease asks for, and none is longer than that allows.
"""

import time
from dataclasses import dataclass

from producer.engine_contract import Completion
from producer.groups import Episode, Rollouts
from producer.rollouts.engine_access import EngineAccess, Progress
from producer.rollouts.prompts import PromptFormat
from protocol.wire.messages import Lease


@dataclass
class PlainRollouts:
    """A `RolloutSource`: one completion after the other for one prompt, as many as the lease asks for."""

    access: EngineAccess
    prompts: PromptFormat
    reward_names: tuple[str, ...] = ()

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        prompts, longest = self.prompts, lease.sampling.max_completion_length
        prompt_ids = await prompts.in_thread(prompts.encode, lease.prompt, longest)
        async with self.access.enter(lease, progress) as sample:
            started = time.monotonic()
            completions = await sample(prompt_ids, lease.sampling)
        generation_s = time.monotonic() - started
        return await prompts.in_thread(self._rollouts, lease, prompt_ids, completions, generation_s)

    def _rollouts(
        self, lease: Lease, prompt_ids: list[int], completions: list[Completion], generation_s: float
    ) -> Rollouts:
        texts = self.prompts.decode(lease.prompt, [completion.token_ids for completion in completions])
        episodes = [Episode.of(prompt_ids, completion) for completion in completions]
        return Rollouts(episodes, generation_s, texts)
