"""One completion after the other for one prompt, without an environment.

Guarantee: as many completions as the lease asks for, none longer.
"""

import time

from producer.groups import Episode, Rollouts, no_rewards
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.prompts import PromptFormat
from producer.rollouts.source import Progress
from protocol.wire.messages import Lease


class PlainRollouts:
    """A `RolloutSource`."""

    reward_names: tuple[str, ...] = ()

    def __init__(self, access: EngineAccess, prompts: PromptFormat) -> None:
        self._access = access
        self._prompts = prompts

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        prompt_ids = self._prompts.encode(lease.prompt, lease.sampling.max_completion_length)
        async with self._access.enter(lease, progress) as sample:
            started = time.monotonic()
            completions = await sample(prompt_ids, lease.sampling)
        generation_s = time.monotonic() - started
        texts = self._prompts.decode(lease.prompt, [completion.token_ids for completion in completions])
        episodes = [Episode.of(prompt_ids, completion) for completion in completions]
        return Rollouts(episodes, generation_s, texts, no_rewards(len(episodes)))
