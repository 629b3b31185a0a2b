"""The life of a rank but the first: `python -m consumer.app.follower`, started by `consumer.ranks.team`.

Guarantee: it takes the steps that rank 0 plans and nothing else, until that ends it; it writes no file but in a scratch folder,
and all that it knows can be lost.
"""

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from consumer.learn.adapters import initial_adapter
from consumer.learn.loss import NotFiniteStep
from consumer.learn.options import build_arguments, build_lora
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.probe import NUM_ROWS, ROW_LENGTH, PolicyProbe, longest_of
from consumer.link.weight_snapshots import gather_weights
from consumer.ranks.exchange import Begin, Piece, PlanError, ProcessRanks, Ranks, Train, next_plan
from consumer.ranks.presence import HeartbeatThread, report_failure
from consumer.ranks.rendezvous import FOREVER_S, connect
from consumer.ranks.team import Member
from protocol.config.run import RunConfig
from protocol.errors import DeviceError, RankLostError
from protocol.runtime import logs
from protocol.runtime.processes import die_with_parent
from protocol.runtime.scratch import scratch_folder
from protocol.wire.model_source import resolve_model
from replay.batch_selection import TrainingBatch
from replay.groups import GroupShape


class PlannedBatches:
    """The batches that rank 0 announces to `trainer`, without an end."""

    trainer: SlipstreamTrainer

    def __init__(self, ranks: Ranks, shape: GroupShape) -> None:
        self._ranks = ranks
        self._shape = shape

    def __iter__(self) -> Iterator[TrainingBatch]:
        while True:
            plan = next_plan(self._ranks, self.trainer)
            if not isinstance(plan, Train):
                raise PlanError("rank 0 began anew")
            yield plan.batch(self._shape)


class _Policies(TrainerCallback):  # type: ignore[misc]
    """A part in the making of policies from a sharded model: the passes of the probe, and the gathering of weights."""

    def __init__(self, trainer: SlipstreamTrainer, config: RunConfig) -> None:
        self._trainer, model = trainer, trainer.model
        rows = np.zeros((NUM_ROWS, min(ROW_LENGTH, longest_of(model))), np.int32)
        every, merged = config.probe_every, config.is_merged_in_16_bits
        self._probe = PolicyProbe(rows, every, model, trainer.accelerator.autocast, merged=merged)
        self._sync_interval = config.pipeline.sync_interval
        if trainer.spreads_weights:
            gather_weights(model)
            self._probe.measure_base()

    def publish(self, step: int) -> None:
        """Do what rank 0 does when it publishes the policy that step `step` starts from."""
        self._probe.measure(step // self._sync_interval)
        if self._trainer.spreads_weights:
            gather_weights(self._trainer.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._sync_interval == 0:
            self.publish(state.global_step)


class _OwnRandomness(TrainerCallback):  # type: ignore[misc]
    """Dropout draws other numbers on each rank, and the same ones when a step is taken again."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed = seed
        self._rank = rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(hash((self._seed, self._rank, state.global_step)))


def follow(config: RunConfig, ranks: Ranks, *, on_gpu: bool) -> None:
    """Train as long as rank 0 says."""
    begin = ranks.share(None)
    if not isinstance(begin, Begin):
        raise PlanError("rank 0 plans a step before it has begun")
    sampling = config.sampling
    shape = GroupShape(
        sampling.num_generations, len(config.reward_names), sampling.max_completion_length, begin.vocab_size
    )
    batches = PlannedBatches(ranks, shape)
    with scratch_folder() as folder:
        receive_files(ranks, begin.files, folder)
        batches.trainer = trainer = _trainer(config, ranks, batches, begin, on_gpu=on_gpu)
        checkpoint = str(folder) if begin.files else None
        if checkpoint is not None and config.changes_base:
            trainer.begin_from(folder)
        if trainer.is_sharded:
            policies = _Policies(trainer, config)
            if trainer.spreads_weights and checkpoint is not None:
                trainer._load_from_checkpoint(checkpoint)
            policies.publish(begin.step)
            trainer.add_callback(policies)
        with contextlib.suppress(NotFiniteStep, DeviceError, RankLostError):  # rank 0 has found the same, and says it
            if begin.trains:
                trainer.train(resume_from_checkpoint=checkpoint)
        next(iter(batches))  # until rank 0 ends this process


def receive_files(ranks: Ranks, sizes: dict[str, int], folder: Path) -> None:
    """Write the checkpoint that rank 0 hands over to `folder`."""
    for name, size in sizes.items():
        with (folder / name).open("wb") as stream:
            while stream.tell() < size:
                piece = ranks.share(None)
                if not isinstance(piece, Piece):
                    raise PlanError(f"rank 0 did not say all of the checkpoint's {name}")
                stream.write(piece.data)


def _trainer(
    config: RunConfig, ranks: Ranks, batches: PlannedBatches, begin: Begin, *, on_gpu: bool
) -> SlipstreamTrainer:
    arguments, lora = build_arguments(config, on_gpu=on_gpu, num_prompts=begin.num_prompts), build_lora(config)
    arguments.save_strategy, arguments.logging_strategy = SaveStrategy.NO, IntervalStrategy.NO
    arguments.report_to, arguments.log_completions = [], False
    folder = resolve_model(config.model.path, config.model.revision, trust_remote_code=config.model.trust_remote_code)
    trainer = SlipstreamTrainer(config, arguments, lora, folder, batches, _keeps_none, ranks)
    if lora is not None and (start := config.lora_section.get("init_from")):
        trainer.start_from(initial_adapter(start, lora), resumed=bool(begin.files))
    trainer.add_callback(_OwnRandomness(config.seed, ranks.rank))
    return trainer


def _keeps_none(step: int, staged: Path, write: Any) -> None:
    raise AssertionError("rank 0 alone writes checkpoints")


def main() -> None:
    member = msgspec.json.decode(sys.stdin.buffer.read(), type=Member)
    die_with_parent(member.parent)
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    config = RunConfig.model_validate_json(bytes(member.config))
    logs.configure(f"rl-trainer rank {member.rank}", config.observability.log_level, config.observability.log_format)
    store, signs = (connect(member.host, member.port) for _ in range(2))
    HeartbeatThread(signs, member.rank).start()
    logs.adopt_libraries()
    transformers.utils.logging.disable_progress_bar()
    # It takes these ranks for those of a DistributedDataParallel that was not started as it likes.
    logging.getLogger("transformers.training_args").setLevel(logging.ERROR)
    device = torch.device("cuda" if member.on_gpu else "cpu")
    with report_failure(store, member.rank, member.silence_s):
        ranks = ProcessRanks(store, member.rank, member.world, device, FOREVER_S)
        follow(config, ranks, on_gpu=member.on_gpu)


if __name__ == "__main__":
    main()
