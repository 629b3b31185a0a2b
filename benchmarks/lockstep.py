"""Training with a staleness that is exact: sampler and trainer take turns in one process.

Guarantee: the groups of step s (from 0) are sampled from policy version max(0, s - staleness), as that version was
published, and from no other; the same prompts are drawn at the same step whatever is trained and however. Log-probs are
of the distribution sampled from, after temperature, in float32.

Everything that trains is the product's: training loop, trainer, correction, published adapters. Only producers, sockets
and journal are missing, which is what makes the staleness free to choose.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import get_peft_model, set_peft_model_state_dict
from safetensors.torch import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from consumer.app.setup import Setup
from consumer.link.policy_store import Snapshot
from protocol.wire.adapter_blob import parse
from replay.batch_selection import GroupStats, TrainingBatch
from replay.groups import RolloutGroup

_EVALUATED_AT_ONCE = 500


@dataclass(frozen=True)
class Samples:
    """Completions of P prompts, n each and adjacent, at most T tokens. Behind its end token a completion has neither
    tokens (pad) nor log-probs (0)."""

    ids: torch.Tensor  # (P * n, T)
    logprobs: torch.Tensor  # (P * n, T)
    lengths: torch.Tensor  # (P * n,), the end token counts


class Sampler:
    """The base model with any published adapter, in place of an inference engine."""

    def __init__(self, setup: Setup) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(setup.model_folder, padding_side="left")
        base = AutoModelForCausalLM.from_pretrained(setup.model_folder, dtype=torch.float32)
        self.model = get_peft_model(base, setup.lora).eval()
        self._loaded: bytes | None = None

    def load(self, blob: bytes) -> None:
        """Uses the adapter that a trainer published as `blob` from now on."""
        if blob is not self._loaded:
            set_peft_model_state_dict(self.model, load(bytes(parse(blob).safetensors)))
            self._loaded = blob

    def tokenize(self, prompt: Any) -> list[int]:
        """Return the tokens of a prompt, which is text or a list of messages."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def sample(
        self,
        prompts: list[list[int]],
        num_generations: int,
        max_length: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Samples:
        """Without a generator the most likely token is taken."""
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        cache = output.past_key_values
        cache.batch_repeat_interleave(num_generations)
        logits = output.logits[:, -1].repeat_interleave(num_generations, dim=0)
        mask = mask.repeat_interleave(num_generations, dim=0)
        running = torch.ones(len(logits), dtype=torch.bool)
        tokens, logprobs, lengths = [], [], torch.zeros(len(logits), dtype=torch.long)
        for position in range(max_length):
            distribution = (logits.float() / temperature).log_softmax(dim=-1)
            token = self._choose(distribution, generator)
            tokens.append(token.where(running, pad))
            logprobs.append(distribution.gather(1, token[:, None])[:, 0].where(running, 0.0))
            lengths += running
            running = running & (token != self.tokenizer.eos_token_id)
            if position + 1 == max_length or not running.any():
                break
            place = mask.sum(dim=1, keepdim=True)
            mask = torch.cat([mask, torch.ones_like(place)], dim=1)
            step = self.model(
                input_ids=tokens[-1][:, None], attention_mask=mask, position_ids=place, past_key_values=cache
            )
            logits = step.logits[:, -1]
        return Samples(torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1), lengths)

    @staticmethod
    def _choose(distribution: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        if generator is None:
            return distribution.argmax(dim=-1)
        noise = torch.empty_like(distribution).exponential_(generator=generator)
        return (distribution - noise.log()).argmax(dim=-1)  # Gumbel's trick: equal noise for equal seeds


class Policies:
    """The last published policies, by version.

    Args:
        keep: policies.
        evaluate_every: steps between two points of `curve`.
        evaluate: the accuracy of a policy.
    """

    def __init__(self, keep: int, evaluate_every: int, evaluate: Callable[[bytes], float]) -> None:
        self._keep = keep
        self._evaluate_every = evaluate_every
        self._evaluate = evaluate
        self._blobs: OrderedDict[int, bytes] = OrderedDict()
        self.curve: dict[int, float] = {}  # accuracy by step

    def __getitem__(self, version: int) -> bytes:
        return self._blobs[version]

    def submit(self, step: int, version: int, snapshot: Snapshot) -> None:
        blob = self._blobs[version] = bytes(snapshot.published(version).data)
        snapshot.release()
        while len(self._blobs) > self._keep:
            self._blobs.popitem(last=False)
        if step % self._evaluate_every == 0:
            self.curve[step] = self._evaluate(blob)


class LockstepFeed:
    """A `consumer.app.run.Feed` that samples the batch of every step when it is asked for it.

    As in a live run, groups without signal are not trained: prompts are drawn in rounds of a batch, and the first groups
    with signal make the batch. Where `rounds` do not give enough, groups without signal fill it, so that a policy which
    gets everything right, or everything wrong, still takes its steps. `reward` is the only one; it takes completions as texts.
    """

    def __init__(
        self,
        setup: Setup,
        sampler: Sampler,
        policies: Policies,
        staleness: int,
        rounds: int,
        reward: Callable[..., Any],
    ) -> None:
        self._setup = setup
        self._sampler = sampler
        self._policies = policies
        self._staleness = staleness
        self._rounds = rounds
        self._reward = reward
        self.wait_s = 0.0
        self.last: TrainingBatch | None = None
        self.num_fillers = 0  # groups trained without signal

    def __iter__(self) -> Iterator[TrainingBatch]:
        for step in range(self._setup.arguments.max_steps):
            self.last = self._cut(step)
            yield self.last

    def _cut(self, step: int) -> TrainingBatch:
        version = max(0, step - self._staleness)
        self._sampler.load(self._policies[version])
        wanted = self._setup.config.pipeline.groups_per_step
        with_signal: list[RolloutGroup] = []
        without: list[RolloutGroup] = []
        for turn in range(self._rounds):
            for group in self._sample(step, turn, version):
                (with_signal if self._setup.rewards.signal(group) > 0 else without).append(group)
            if len(with_signal) >= wanted:
                break
        groups = (with_signal + without)[:wanted]
        self.num_fillers += max(0, wanted - len(with_signal))
        arrivals = [GroupStats.of(group) for group in with_signal] + [
            GroupStats.of(group, "no_signal") for group in without
        ]
        return TrainingBatch(step + 1, 1, step + 1, groups, len(groups), arrivals)

    def _sample(self, step: int, turn: int, version: int) -> list[RolloutGroup]:
        """A round of groups; prompts and noise depend on seed, step and round alone."""
        config = self._setup.config
        sampling, count = config.sampling, config.pipeline.groups_per_step
        rows = self._prompt_ids(count * (step * self._rounds + turn), count)
        prompts, columns = zip(*(self._setup.prompts[row] for row in rows), strict=True)
        prompt_ids = [self._sampler.tokenize(prompt) for prompt in prompts]
        samples = self._sampler.sample(
            prompt_ids,
            sampling.num_generations,
            sampling.max_completion_length,
            sampling.temperature,
            torch.Generator().manual_seed(int(np.random.SeedSequence([config.seed, step, turn]).generate_state(1)[0])),
        )
        names = [
            f"{step}-{row}-0-1-{turn}" for row in rows
        ]  # like the ids of leases: epoch, prompt, reroll, attempt, session
        return [
            self._group(name, version, prompt, ids, part, given)
            for name, prompt, ids, part, given in zip(
                names, prompts, prompt_ids, _split(samples, sampling.num_generations), columns, strict=True
            )
        ]

    def _prompt_ids(self, first: int, count: int) -> list[int]:
        """Places `first` to `first + count` of the seed's endless shuffle of the dataset."""
        length, seed = len(self._setup.prompts), self._setup.config.seed
        epochs = range(first // length, (first + count - 1) // length + 1)
        order = np.concatenate([np.random.default_rng([seed, epoch]).permutation(length) for epoch in epochs])
        return order[first % length :][:count].tolist()

    def _group(
        self, name: str, version: int, prompt: Any, prompt_ids: list[int], samples: Samples, columns: dict[str, Any]
    ) -> RolloutGroup:
        kept = torch.arange(samples.ids.shape[1]) < samples.lengths[:, None]
        completion_ids = [row[:length].tolist() for row, length in zip(samples.ids, samples.lengths, strict=True)]
        texts = self._sampler.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        repeated = {column: [value] * len(texts) for column, value in columns.items()}
        scores = self._reward(
            prompts=[prompt] * len(texts), completions=texts, completion_ids=completion_ids, **repeated
        )
        last = samples.ids.gather(1, samples.lengths[:, None] - 1)[:, 0]
        return RolloutGroup(
            lease_id=name,
            policy_version=version,
            prompt_ids=np.array(prompt_ids, np.int32),
            completion_lengths=samples.lengths.numpy().astype(np.int32),
            completion_ids=samples.ids[kept].numpy().astype(np.int32),
            logprobs=samples.logprobs[kept].numpy(),
            rewards=np.array([scores], np.float32).T.copy(),
            truncated=(last != self._sampler.tokenizer.eos_token_id).numpy(),
        )


def _split(samples: Samples, num_generations: int) -> list[Samples]:
    parts = (part.split(num_generations) for part in (samples.ids, samples.logprobs, samples.lengths))
    return [Samples(*part) for part in zip(*parts, strict=True)]


def greedy_accuracy(
    sampler: Sampler, rows: list[dict[str, Any]], blob: bytes, reward: Callable[..., Any], max_length: int
) -> float:
    """Return the mean reward of greedy answers to rows {"prompt", "answer"}; one without a reward counts as 0."""
    sampler.load(blob)
    right = 0.0
    for start in range(0, len(rows), _EVALUATED_AT_ONCE):
        part = rows[start : start + _EVALUATED_AT_ONCE]
        prompts = [sampler.tokenize(row["prompt"]) for row in part]
        samples = sampler.sample(prompts, 1, max_length, 1.0, None)
        texts = sampler.tokenizer.batch_decode(samples.ids, skip_special_tokens=True)
        asked = {"prompts": [row["prompt"] for row in part], "answer": [row["answer"] for row in part]}
        right += sum(score or 0.0 for score in reward(completions=texts, **asked))
    return right / len(rows)
