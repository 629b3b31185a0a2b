"""A producer, a buffer and a trainer that take turns in one process, counting every token that is generated.

Guarantee: prompts go out as leases of a real rollout buffer, as many as its staleness budget gives; every group is
sampled from the newest published policy, scored, sent through the wire's codec and offered. So ledger, rerolls, replay
table, journal and batch cutter are the product's; only sockets and the inference engine are not. Equal configurations
give equal runs.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.lockstep import Sampler, Samples
from consumer.publishing.published_policy import Snapshot
from consumer.training.pipeline import Pipeline
from consumer.training.run_components import RunComponents
from consumer.waiting import StopRequested
from protocol.config.functions import load_function
from protocol.wire.codec import decode, encode
from protocol.wire.messages import Group
from replay.batches.cutting import CutBatch
from replay.batches.delivery import Delivery
from replay.buffer import RolloutBuffer
from replay.journal.tables import StepCut
from replay.journal.writer import Journal
from replay.lease_ids import Key
from replay.prompts.leases import LeaseRecord

PRODUCER = "lockstep"
_FOREVER_S = 1e9
_AT_ONCE = 4  # prompts; few, so that a batch is cut as soon as there is one, as by a trainer that waits


class LeasingFeed:
    """A `consumer.training.pipeline.Feed`: asked for a batch, it fulfils leases until the buffer cuts one.

    Args:
        policies: `version` and `blob` of the newest one.
        budget_tokens: completion tokens after which no batch is made any more.
    """

    def __init__(
        self, setup: RunComponents, sampler: Sampler, buffer: RolloutBuffer, policies: "Policies", budget_tokens: int
    ) -> None:
        self._setup = setup
        self._sampler = sampler
        self._buffer = buffer
        self._policies = policies
        self._budget_tokens = budget_tokens
        function = setup.config.rewards.functions[0].function
        self._reward = load_function(str(function), "rewards.functions.0.function")
        self._generator = torch.Generator().manual_seed(setup.config.seed)
        self._arrived = 0  # groups since the last batch
        self.tokens = 0  # generated
        self.wait_s = 0.0
        self.last: CutBatch | None = None

    def __iter__(self) -> Iterator[CutBatch]:
        while True:
            started = time.monotonic()
            self._arrived = 0
            while (batch := self._buffer.next_batch(0.0, partial=self._waited_enough)) is None:
                if self.tokens >= self._budget_tokens:
                    raise StopRequested
                self._fulfil(self._leases())
            self.last = batch
            self.wait_s = time.monotonic() - started
            yield batch

    @property
    def _waited_enough(self) -> bool:
        """Under `fill: partial`, as long as it takes to generate a batch of groups, with or without signal."""
        pipeline = self._setup.config.pipeline
        return pipeline.fill == "partial" and self._arrived >= pipeline.groups_per_step

    def _leases(self) -> list[LeaseRecord[Key]]:
        leases: list[LeaseRecord[Key]] = []
        while len(leases) < _AT_ONCE:
            lease = self._buffer.lease(PRODUCER, now=0.0, timeout_s=_FOREVER_S)
            if lease is None:
                break
            assert lease.policy_floor <= self._policies.version
            leases.append(lease)
        assert leases, "the buffer has neither a batch nor a lease"
        return leases

    def _fulfil(self, leases: Sequence[LeaseRecord[Key]]) -> None:
        sampling = self._setup.config.sampling
        prompts, columns = zip(*(self._setup.prompts[lease.work.key.prompt_id] for lease in leases), strict=True)
        prompt_ids = self._sampler.tokenizer(list(prompts))["input_ids"]
        self._sampler.load(self._policies.blob)
        samples = self._sampler.sample(
            prompt_ids,
            sampling.num_generations,
            sampling.max_completion_length,
            sampling.temperature,
            self._generator,
        )
        rewards = self._score(prompts, columns, samples)
        self.tokens += int(samples.lengths.sum())
        deliveries = []
        for index, lease in enumerate(leases):
            rows = slice(index * sampling.num_generations, (index + 1) * sampling.num_generations)
            part = Samples(samples.ids[rows], samples.logprobs[rows], samples.lengths[rows])
            frame = encode(self._group(lease.lease_id, prompt_ids[index], part, rewards[rows]))
            deliveries.append(Delivery(self._setup.shape.parse(decode(frame)), frame, PRODUCER))
        self._buffer.offer(deliveries)
        self._arrived += len(deliveries)

    def _score(self, prompts: Sequence[str], columns: Sequence[dict[str, Any]], samples: Samples) -> np.ndarray:
        count = self._setup.config.sampling.num_generations
        ids = [row[:length].tolist() for row, length in zip(samples.ids, samples.lengths, strict=True)]
        texts = self._sampler.tokenizer.batch_decode(ids, skip_special_tokens=True)
        names = columns[0]
        repeated = {name: [row[name] for row in columns for _ in range(count)] for name in names}
        repeated_prompts = [prompt for prompt in prompts for _ in range(count)]
        scores = self._reward(prompts=repeated_prompts, completions=texts, completion_ids=ids, **repeated)
        return np.array(scores, "<f4")

    def _group(self, lease_id: str, prompt_ids: list[int], samples: Samples, rewards: np.ndarray) -> Group:
        kept = torch.arange(samples.ids.shape[1]) < samples.lengths[:, None]
        last = samples.ids.gather(1, samples.lengths[:, None] - 1)[:, 0]
        return Group(
            lease_id=lease_id,
            policy_version=self._policies.version,
            prompt_ids=np.array(prompt_ids, "<i4").tobytes(),
            completion_lengths=samples.lengths.numpy().astype("<i4").tobytes(),
            completion_ids=samples.ids[kept].numpy().astype("<i4").tobytes(),
            logprobs=samples.logprobs[kept].numpy().astype("<f4").tobytes(),
            rewards=rewards.tobytes(),
            truncated=(last != self._sampler.tokenizer.eos_token_id).numpy().astype("u1").tobytes(),
            generation_s=0.0,
            reward_s=0.0,
        )


class Policies(Pipeline):
    """Keeps the newest policy. It knows a policy before the buffer leases for it,
    and the journal knows it before both."""

    def __init__(self, buffer: RolloutBuffer, journal: Journal) -> None:
        super().__init__(journal.newest_cut)
        self._buffer = buffer
        self._journal = journal
        self.version = -1
        self.blob = b""

    def publish(self, step: int, version: int, snapshot: Snapshot, cut: StepCut | None = None) -> None:
        self._journal.end_step(step, cut)
        policy = snapshot.published(version)
        self._journal.note_policy(version, step, policy.digest)
        self.version, self.blob = version, bytes(policy.data)
        policy.release()
        self._buffer.published(version)

    def end_step(self, step: int, cut: StepCut | None = None) -> None:
        self._journal.end_step(step, cut)

    def observe(self, effective_share: float | None, wait_share: float) -> dict[str, float]:
        return {f"pipeline/{name}": float(count) for name, count in self._buffer.depth().items()}

    def state(self) -> dict[str, Any]:
        return self._buffer.state()
