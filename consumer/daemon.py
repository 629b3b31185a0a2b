"""The trainer's life: wiring, start, run, stop. No logic of its own.

Start: configuration of the libraries, dataset, checkpoint, endpoint, model; then version v is published and the doors
open. Stop, in this order: the step in progress ends, a checkpoint is committed, the final adapter is written, producers
are told, sockets close.
"""

import json
import logging
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import AutoConfig

from consumer import checkpoints
from consumer.advantages import has_signal
from consumer.feed import BatchFeed, StopRequested
from consumer.intake import Intake
from consumer.progress import StepReport
from consumer.prompts import PromptDataset
from consumer.run_control import RunControl
from consumer.trainer import SlipstreamTrainer, build_arguments, build_lora
from protocol.config import RunConfig
from protocol.digests import base_model_digest, resolve_model, tokenizer_digest
from protocol.errors import ConfigError, DatasetError, DeviceError, ExitCode
from protocol.handshake import TrainerNeeds
from protocol.messages import Sampling
from protocol.zmq_channel import ZmqServer
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape, RolloutGroup
from replay.ledger import PromptLedger
from replay.staleness import StalenessBudget
from replay.table import FifoTable

logger = logging.getLogger(__name__)


def check_libraries(config: RunConfig) -> None:
    """Validates the `trainer` and `lora` sections by TRL and PEFT, without loading a model."""
    build_lora(config)
    build_arguments(config, on_gpu=False, num_prompts=1)


def run(config: RunConfig, gpus: list[int], *, resume: bool) -> ExitCode:
    """Trains until done or told to stop.

    Raises:
        SlipstreamError: what ended the run, for the user.
    """
    stop = _StopFlag()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    _prepare_device(gpus)
    lora = build_lora(config)
    prompts = PromptDataset(config.dataset)
    arguments = build_arguments(config, on_gpu=bool(gpus), num_prompts=len(prompts))
    start = checkpoints.starting_point(config.checkpoints_dir, resume)
    model_folder = resolve_model(config.model.path, config.model.revision)
    session = secrets.token_hex(4)  # of this process; the run may outlive it
    first_step, run_id = (start.step, start.run_id) if start else (0, secrets.token_hex(8))

    budget = StalenessBudget(
        config.pipeline.groups_per_step,
        config.pipeline.max_staleness,
        config.pipeline.sync_interval,
        arguments.num_iterations,
    )
    buffer = _buffer(config, budget, len(prompts), session, arguments.multi_objective_aggregation)
    if start is not None:
        try:
            buffer.restore(start.state, step=first_step)
        except ValueError as error:
            raise DatasetError(f"dataset.path: {error}; go on with the old one, or choose another run_dir") from error
        logger.info("resuming at step %d from %s", first_step, start.folder)
    channel = ZmqServer(config.control_endpoint, config.blob_endpoint, config.transport.max_message_bytes)
    intake = _intake(config, channel, buffer, prompts, model_folder, run_id, session)
    report = StepReport(
        Path(config.run_dir),
        buffer,
        max_steps=arguments.max_steps,
        first_step=first_step,
        show_bar=config.observability.progress,
    )
    feed = BatchFeed(
        buffer, intake, stop_requested=stop, say=report.say, stall_timeout_s=config.pipeline.stall_timeout_s
    )
    control = RunControl(
        buffer,
        budget,
        intake,
        feed,
        report,
        sync_interval=config.pipeline.sync_interval,
        keep_checkpoints=arguments.save_total_limit,
        run_id=run_id,
        stop_requested=stop,
    )
    try:
        trainer = SlipstreamTrainer(
            config, arguments, lora, model_folder, (batch.groups for batch in feed), callbacks=[control]
        )
    except (ValueError, TypeError, NotImplementedError, ImportError, RuntimeError) as error:
        raise ConfigError(f"TRL or PEFT refused to build the trainer: {error}") from error
    control.trainer = trainer
    if start is not None:
        try:
            trainer._load_from_checkpoint(str(start.folder))
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"run_dir: {start.folder} does not fit model.path and lora: {error}") from error
    control.publish(first_step)
    intake.start()
    report.say(f"rl-trainer: listening at {config.control_endpoint}; waiting for producers")

    started, finished = time.monotonic(), False
    try:
        if first_step < arguments.max_steps:
            trainer.train(resume_from_checkpoint=str(start.folder) if start else None)
        else:  # transformers would wait for one batch more
            trainer.state.global_step = first_step
        finished = trainer.state.global_step >= arguments.max_steps
    except StopRequested:
        control.save_if_needed(first_step)
    finally:
        intake.stop("finished" if finished else "stopping")
        report.close()
    if finished:
        trainer.save_model(str(Path(config.run_dir) / "adapter"))
    summary = {
        "finished": finished,
        "steps": trainer.state.global_step,
        "wall_s": time.monotonic() - started,
        "tokens_generated": intake.tokens_generated,
        "counts": dict(buffer.counts),
    }
    (Path(config.run_dir) / "trainer.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    outcome = "finished" if finished else "stopped"
    hint = "" if finished else "; go on with --resume"
    report.say(f"rl-trainer: {outcome} at step {trainer.state.global_step} of {arguments.max_steps}{hint}")
    return ExitCode.OK


def _buffer(
    config: RunConfig, budget: StalenessBudget, num_prompts: int, session: str, aggregation: str
) -> RolloutBuffer:
    weights = torch.tensor([function.weight for function in config.rewards.functions])

    def moves_policy(group: RolloutGroup) -> bool:
        return has_signal(torch.tensor(group.rewards), weights, aggregation=aggregation)

    ledger = PromptLedger(
        num_prompts,
        seed=config.seed,
        shuffle=config.dataset.shuffle,
        max_attempts=config.pipeline.max_attempts,
        session=session,
    )
    return RolloutBuffer(
        ledger, budget, FifoTable(), has_signal=moves_policy, max_failed_share=config.pipeline.max_failed_share
    )


def _intake(
    config: RunConfig,
    channel: ZmqServer,
    buffer: RolloutBuffer,
    prompts: PromptDataset,
    model_folder: Path,
    run_id: str,
    session: str,
) -> Intake:
    sampling = config.sampling
    names = config.rewards.names
    return Intake(
        channel,
        buffer,
        prompts,
        needs=TrainerNeeds(
            base_model_digest=base_model_digest(model_folder),
            tokenizer_digest=tokenizer_digest(model_folder),
            dtype=config.model.dtype,
            lora_rank=config.lora["r"],
            max_loras=config.max_loras,
            max_completion_length=sampling.max_completion_length,
            reward_names=names,
        ),
        shape=GroupShape(
            sampling.num_generations,
            len(names),
            sampling.max_completion_length,
            AutoConfig.from_pretrained(model_folder).get_text_config().vocab_size,
        ),
        sampling=Sampling(
            sampling.num_generations,
            sampling.max_completion_length,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
        ),
        run_id=run_id,
        session=session,
        lease_timeout_s=config.pipeline.lease_timeout_s,
        heartbeat_interval_s=config.transport.heartbeat_interval_s,
        heartbeat_timeout_s=config.transport.heartbeat_timeout_s,
        keep_blobs=config.max_loras,
    )


class _StopFlag:
    """Set by the first SIGTERM or SIGINT; the second one ends the process at once."""

    def __init__(self) -> None:
        self._requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        return self._requested

    def _handle(self, number: int, frame: Any) -> None:
        if self._requested:
            os._exit(ExitCode.INTERRUPTED)
        self._requested = True


def _prepare_device(gpus: list[int]) -> None:
    if not gpus:
        # One core is the engine's when both daemons share a machine.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 2) - 1)))
    elif torch.cuda.device_count() < len(gpus):
        raise DeviceError(
            f"--gpu {','.join(map(str, gpus))}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "install a CUDA build of torch that fits the driver, or use --gpu cpu"
        )
    elif len(gpus) > 1:
        raise DeviceError("rl-trainer takes one GPU: LoRA steps fit one; give the others to producers")
