"""The trainer and the loop around it, and what they are connected to when they train again from a journal. Wiring only."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import TrainerCallback

from consumer.batches.step_cuts import Recorded
from consumer.checkpoints import folders as checkpoints
from consumer.publishing.snapshots import Probe, probe_tokens
from consumer.ranks.exchange import ALONE, Ranks
from consumer.ranks.leading import LedBatches, begin
from consumer.reporting.sampled_rollouts import RolloutLog
from consumer.training.base_loading import loading
from consumer.training.callbacks import Heartbeat, RunControl
from consumer.training.feed import RecordedFeed, RecordedRun
from consumer.training.loop import TrainingLoop
from consumer.training.pipeline import CheckpointWriter, Connections, Pipeline
from consumer.training.quantization import unquantized_probe
from consumer.training.run_components import RunComponents, RunStart
from consumer.training.trainer import SlipstreamTrainer
from consumer.waiting import ThreadErrors, WaitPolicy
from protocol.exposition import Watch
from protocol.runtime import logs


def training_loop(
    components: RunComponents,
    connections: Connections,
    start: RunStart,
    callbacks: Sequence[TrainerCallback] = (),
    ranks: Ranks = ALONE,
) -> TrainingLoop:
    """The loop, with the weights that it starts from loaded.

    Args:
        callbacks: after that of the loop.
        ranks: that take the steps together.

    Raises:
        ConfigError: TRL or PEFT refused, or adapter or checkpoint do not fit.
        DeviceError: the device has no memory for the model, or failed.
    """
    config, arguments = components.config, components.arguments
    checkpoints = CheckpointWriter(
        config.checkpoints_dir, connections.pipeline, connections.waits, start.run_id, arguments.save_total_limit
    )
    if ranks.world > 1:
        begin(ranks, len(components.prompts), components.shape.vocab_size, start.checkpoint)
    batches = LedBatches(connections.feed, ranks)
    trainer = _trainer(components, batches, checkpoints, start, ranks, connections.pipeline.newest_cut)
    control = RunControl(
        trainer,
        connections,
        components.budget,
        _probe(components, trainer),
        RolloutLog(config, trainer.recipe, trainer.processing_class.decode, start.step),
        components.stop,
    )
    for callback in (control, *callbacks):
        trainer.add_callback(callback)
    return TrainingLoop(trainer, control, connections, start, Path(config.run_dir))


def _probe(components: RunComponents, trainer: SlipstreamTrainer) -> Probe:
    config, model = components.config, trainer.accelerator.unwrap_model(trainer.model)
    tokens = probe_tokens(components.prompts, trainer.processing_class, config.seed)
    if config.model.quantization is None:
        return Probe(tokens, config.swap.probe_every, model, trainer.accelerator.autocast)
    folder, every = components.model_folder, config.swap.probe_every
    return unquantized_probe(tokens, every, config.model, folder, components.lora, model)


def _trainer(
    components: RunComponents,
    batches: LedBatches,
    checkpoints: CheckpointWriter,
    start: RunStart,
    ranks: Ranks,
    recorded: Recorded,
) -> SlipstreamTrainer:
    with loading("TRL or PEFT refused to build the trainer"):
        trainer = SlipstreamTrainer(
            components.config, components.arguments, components.lora, components.model_folder, batches, checkpoints.commit,
            ranks, recorded,
        )  # fmt: skip
    if components.initial_adapter is not None:
        trainer.start_from(components.initial_adapter, resumed=start.checkpoint is not None)
    if start.checkpoint is not None:
        folder = start.checkpoint.folder
        with loading(f"run_dir: {folder} does not fit model.path and lora"):
            trainer._load_from_checkpoint(str(folder))  # before the first policy is published
    return trainer


def retraining(
    components: RunComponents, recorded: RecordedRun, watch: Watch, *, resume: bool
) -> tuple[RunStart, Connections, Heartbeat, Counter[str]]:
    """Where it starts, what the loop is connected to, and what counts the groups."""
    config = components.config
    run_id = recorded.check(components.facts("?"))
    logs.bind(run=run_id)
    torch.set_num_threads(recorded.num_threads)
    run_dir, folder = Path(config.run_dir), config.checkpoints_dir
    start = RunStart(run_id, checkpoints.starting_point(run_dir, folder, has_groups=False, resume=resume))
    checkpoints.clear_leftovers(folder)
    counts: Counter[str] = Counter()
    report = components.report(counts, start.step, watch.registry)
    heartbeat = Heartbeat(watch.health, components.stop, ThreadErrors())
    waits = WaitPolicy(check=heartbeat.check, say=report.say, stall_timeout_s=config.pipeline.stall_timeout_s)
    feed = RecordedFeed(recorded, components.shape, heartbeat.check, start.step, counts)
    return start, Connections(feed, Pipeline(recorded.newest_cut), report, waits), heartbeat, counts
