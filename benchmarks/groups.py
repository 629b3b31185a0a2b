"""The group that is measured with: 8 completions of 512 tokens.

Guarantee: every group has the same number of bytes and passes every check of intake; the tokens differ from group to group.
"""

import numpy as np

from protocol.wire.codec import encode
from protocol.wire.handshake import LOGPROBS_MODE, TrainerNeeds
from protocol.wire.messages import EngineFacts, Group
from replay.groups import GroupShape

SHAPE = GroupShape(num_generations=8, num_rewards=1, max_completion_length=512, vocab_size=150_000)
_PROMPT_TOKENS = 128
_DISTINCT = 64  # token arrays that are made once and used in turn


class GroupFactory:
    """Makes groups for leases, at next to no cost."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        total = SHAPE.num_generations * SHAPE.max_completion_length
        self._ids = [rng.integers(1, SHAPE.vocab_size, total).astype("<i4").tobytes() for _ in range(_DISTINCT)]
        self._logprobs = [np.log(rng.uniform(0.01, 1.0, total)).astype("<f4").tobytes() for _ in range(_DISTINCT)]
        self._prompt_ids = rng.integers(1, SHAPE.vocab_size, _PROMPT_TOKENS).astype("<i4").tobytes()
        self._lengths = np.full(SHAPE.num_generations, SHAPE.max_completion_length, "<i4").tobytes()
        self._rewards = np.arange(SHAPE.num_generations).astype("<f4").tobytes()
        self._truncated = bytes(SHAPE.num_generations)
        self._made = 0

    def group(self, lease_id: str, policy_version: int) -> Group:
        self._made += 1
        return Group(
            lease_id=lease_id,
            policy_version=policy_version,
            prompt_ids=self._prompt_ids,
            completion_lengths=self._lengths,
            completion_ids=self._ids[self._made % _DISTINCT],
            logprobs=self._logprobs[self._made % _DISTINCT],
            rewards=self._rewards,
            truncated=self._truncated,
            generation_s=1.0,
            reward_s=0.1,
        )

    def frame(self, lease_id: str) -> bytes:
        """As it goes over the wire and into the journal."""
        return encode(self.group(lease_id, 0))


HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S = 1.0, 30.0
MAX_MESSAGE_BYTES = 64 * 2**20
ENGINE_FACTS = EngineFacts("0" * 64, "1" * 64, "float32", LOGPROBS_MODE, 8, 66, 1024, ["reward"])
NEEDS = TrainerNeeds("0" * 64, "1" * 64, "float32", 8, 66, SHAPE.max_completion_length, ("reward",))

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""Of engine and trainer, by device: vLLM's LoRA kernels on CUDA take 16 bits only."""
ENGINE_SHARE: dict[str, dict[str, float]] = {"cpu": {}, "cuda": {"gpu_memory_utilization": 0.2}}
"""Of the GPU's memory, for each of three engines, or for one beside a trainer."""
