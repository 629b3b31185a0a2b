"""One step of Slipstream, from a prompt to the swap, in one process and in reading order: `python -m docs.one_step`.

Each part is the one that the daemons use. What is left out are the sockets between the two, the threads that let them overlap,
and what happens when something fails. docs/architecture.md walks the same way with all of it.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from transformers import Qwen2Config, Qwen2ForCausalLM

from consumer.app.setup import Setup
from consumer.app.wiring import rollout_buffer
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.policy_store import PolicyStore
from consumer.link.probe import PolicyProbe, probe_rows
from consumer.link.snapshots import AdapterSnapshots
from examples.arithmetic.build_model import EOS, PAD, VOCAB, make_tokenizer, save
from producer.app.timeline import Timeline
from producer.engine.engine import VllmEngine
from producer.groups import Episode, group_message
from producer.metrics import Counters, ProducerMetrics
from producer.policies.loader import DownloadedPolicy, PolicyLoader
from producer.policies.probe import SwapProof, probe_of
from producer.policies.registry import AdapterRegistry, SwapReport
from producer.rewards.pool import RewardPool
from producer.rollouts.in_flight import InFlight
from producer.rollouts.prompts import PromptFormat, load_tokenizer
from protocol.config.operation import TOLERANCES
from protocol.config.run import RunConfig
from protocol.runtime.scratch import NO_MEMORY
from protocol.wire.codec import decode, encode
from protocol.wire.messages import BlobRequest, Lease, PolicyRequest, Sampling
from replay.batch_selection import OfferedGroup, TrainingBatch
from replay.journal.writer import Journal


def configuration(folder: Path) -> RunConfig:
    """A run of one step on a tiny model of random weights, which is rewarded for short completions."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(VOCAB), num_key_value_heads=4, **shape, **ends))
    save(folder / "model", model, make_tokenizer(VOCAB, max_length=64), train=[{"prompt": "37+45="}], evaluation=[])
    sections = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "dataset": {"path": str(folder / "model" / "train.jsonl")},
        "rewards": {"functions": [{"function": "length_penalty"}], "num_workers": 1},
        "sampling": {"num_generations": 8, "max_completion_length": 16},
        "pipeline": {"groups_per_step": 1, "max_staleness": 0},
        "engine": {"max_model_len": 64, "max_num_seqs": 8, "enforce_eager": True},
        "trainer": {"max_steps": 1, "learning_rate": 0.01, "save_strategy": "no"},
    }
    return RunConfig.model_validate(sections)


async def one_step(config: RunConfig) -> None:
    run_dir, sampling = Path(config.run_dir), config.sampling
    # The trainer's parts: what follows from the configuration, the journal, the buffer, TRL's trainer.
    components = Setup.load(config, [], stop=lambda: False)
    journal = Journal(config.journal_file)
    buffer = rollout_buffer(components, journal, session="one")
    buffer.restore(None, step=0, shape=components.shape)

    def batches() -> Iterator[TrainingBatch]:
        batch = buffer.next_batch(timeout_s=0.0)
        print(f"cut      {len(batch.groups)} group for step {batch.last_step}, as the journal now says")
        yield batch

    trainer = SlipstreamTrainer(
        config, components.arguments, components.lora, components.model_folder, batches(), lambda *_: None
    )
    model = trainer.accelerator.unwrap_model(trainer.model)
    snapshots = AdapterSnapshots(model)
    rows = probe_rows(components.prompts, trainer.processing_class, config.seed, longest=120)
    probe = PolicyProbe(rows, 1, model, trainer.accelerator.autocast)
    store = PolicyStore(keep=2, memory=NO_MEMORY)
    # The producer's parts: vLLM, the policies it holds, the reward workers.
    engine = VllmEngine(config, num_gpus=0)
    await engine.warm_up()
    counters, metrics = Counters(), ProducerMetrics(CollectorRegistry(), config.reward_names)
    loader = PolicyLoader(engine.weights, lambda _: run_dir / "adapters", SwapProof(TOLERANCES["float32"]))
    policies = AdapterRegistry(loader, SwapReport(counters, metrics, Timeline(run_dir / "timeline.jsonl").record))
    in_flight = InFlight(engine, policies, counters, "finish")
    tokenizer = load_tokenizer(components.model_folder, trust_remote_code=False)
    prompts = PromptFormat(tokenizer, config.engine["max_model_len"], {})
    rewards = RewardPool(config.computed_rewards, metrics)
    await rewards.start()

    def publish(version: int) -> None:
        policy = snapshots.take(probe.measure(version)).published(version)
        journal.note_policy(version, version, policy.digest)  # before any producer hears of it
        store.publish(policy)
        buffer.published(version)
        print(f"publish  version {version}, {len(policy.data)} bytes, sha256 {policy.digest[:16]}...")

    async def swap() -> None:
        policy = store.newest
        offer = store.offer(PolicyRequest(policy.digest))
        blob = store.chunk(BlobRequest(policy.digest, 0, policy.num_bytes)).data
        live = await policies.publish(DownloadedPolicy(policy, blob, time.monotonic(), probe_of(offer)))
        print(f"swap     version {policy.version}: {'live, and computes what the trainer does' if live else 'refused'}")

    publish(0)
    await swap()
    # Lease: the ledger picks a prompt, the staleness budget the oldest policy that may answer it.
    record = buffer.lease("producer", now=time.monotonic(), timeout_s=60.0)
    prompt, columns = components.prompts[record.task.key.prompt_id]
    how = Sampling(sampling.num_generations, sampling.max_completion_length, sampling.temperature)
    lease = decode(encode(Lease(str(record.lease_id), 0, 1, prompt, columns, how, record.policy_floor, 60.0)))
    print(f"lease    {lease.lease_id}: {lease.prompt!r}, from policy version {lease.policy_floor} on")
    # Generation and reward.
    prompt_ids = prompts.encode(lease.prompt, lease.sampling.max_completion_length)
    completions = await in_flight.sample(prompt_ids, lease.sampling)
    token_ids = [completion.token_ids for completion in completions]
    scores, *_ = await rewards.score(lease.prompt, prompts.decode(lease.prompt, token_ids), token_ids, lease.columns)
    print(f"generate {len(completions)} completions of {[len(ids) for ids in token_ids]} tokens")
    print(f"reward   {[round(float(score), 3) for score in scores[:, 0]]}")
    episodes = [Episode.of(prompt_ids, completion) for completion in completions]
    frame = encode(group_message(lease.lease_id, episodes, scores, sampling.max_completion_length, 0.0, 0.0))
    # Journal: the group is durable before it is acknowledged.
    group = components.shape.parse(decode(frame))
    [answer] = buffer.offer([OfferedGroup(group, frame, "producer")])
    print(f"journal  group of {group.num_tokens} tokens: {answer}")
    # Cut, loss, step: the trainer asks for its batch, which the journal claims for the step before it begins.
    trainer.train()
    journal.end_step(1)
    [logged] = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    print(f"step     1: loss {logged['loss']:.4f}, gradient norm {logged['grad_norm']:.3f}")
    publish(1)
    await swap()
    await rewards.close()
    engine.shutdown()
    journal.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(one_step(configuration(Path(scratch))))
