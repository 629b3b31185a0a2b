"""The trainer and the loop around it. Wiring only."""

from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerCallback

from consumer.publishing.probe import Probe, probe_tokens
from consumer.reporting.sampled_rollouts import RolloutLog
from consumer.training.callbacks import RunControl
from consumer.training.checkpoint_writer import CheckpointWriter
from consumer.training.loop import TrainingLoop
from consumer.training.pipeline import Connections, Feed
from consumer.training.run_components import RunComponents, RunStart
from consumer.training.trainer import SlipstreamTrainer
from consumer.training.trl_arguments import REFUSALS
from protocol.errors import ConfigError


def training_loop(
    components: RunComponents, connections: Connections, start: RunStart, callbacks: Sequence[TrainerCallback] = ()
) -> TrainingLoop:
    """The loop, with the weights that it starts from loaded.

    Args:
        callbacks: after that of the loop.

    Raises:
        ConfigError: TRL or PEFT refused, or adapter or checkpoint do not fit.
    """
    config, arguments = components.config, components.arguments
    checkpoints = CheckpointWriter(
        config.checkpoints_dir, connections.pipeline, connections.patience, start.run_id, arguments.save_total_limit
    )
    trainer = _trainer(components, connections.feed, checkpoints, start)
    control = RunControl(
        trainer,
        connections,
        components.budget,
        Probe(
            probe_tokens(components.prompts, trainer.processing_class, config.seed),
            config.swap.probe_every,
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.accelerator.autocast,
        ),
        RolloutLog(config, trainer.recipe, trainer.processing_class.decode, start.step),
        components.stop,
    )
    for callback in (control, *callbacks):
        trainer.add_callback(callback)
    return TrainingLoop(trainer, control, connections, start, Path(config.run_dir))


def _trainer(
    components: RunComponents, feed: Feed, checkpoints: CheckpointWriter, start: RunStart
) -> SlipstreamTrainer:
    try:
        trainer = SlipstreamTrainer(
            components.config, components.arguments, components.lora, components.model_folder, feed, checkpoints.commit
        )
    except REFUSALS as error:
        raise ConfigError(f"TRL or PEFT refused to build the trainer: {error}") from error
    if components.initial_adapter is not None:
        trainer.start_from(components.initial_adapter, resumed=start.checkpoint is not None)
    if start.checkpoint is not None:
        folder = start.checkpoint.folder
        try:
            trainer._load_from_checkpoint(str(folder))  # before the first policy is published
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"run_dir: {folder} does not fit model.path and lora: {error}") from error
    return trainer
