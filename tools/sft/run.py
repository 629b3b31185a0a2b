"""`rl-sft` trains a supervised warm start from the run's own configuration and dataset.

Guarantee: the result is a plain PEFT adapter with the run's `lora` settings, which `lora.init_from` takes; it appears whole
and on the disk.
"""

import sys
from pathlib import Path

import datasets
from datasets import Dataset
from transformers.utils import logging as transformers_logging

from consumer.checkpoints.adapter_folder import AdapterFolder
from consumer.training.trl_arguments import build_lora
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ExitCode
from protocol.files.staged import staged
from protocol.service import logs
from tools.run_inputs import RunInputs
from tools.sft.rows import training_rows
from tools.sft.trainer import build_sft_arguments, train


def check_libraries(config: RunConfig) -> None:
    """Validates the `sft` and `lora` sections by TRL and PEFT, without loading a model."""
    build_lora(config)
    build_sft_arguments(config, Path(config.run_dir), on_gpu=False)


def run(config: RunConfig, gpus: list[int], *, to: Path) -> ExitCode:
    """
    Args:
        to: the folder to write.

    Raises:
        SlipstreamError: what ended it, for the user.
    """
    if to.exists():
        raise ConfigError(f"--to: {to} exists already; remove it, or choose another folder")
    logs.adopt_libraries()
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    with staged(to) as partial:
        lora, arguments = build_lora(config), build_sft_arguments(config, partial, on_gpu=bool(gpus))
        inputs = RunInputs(config)
        rows = Dataset.from_list(list(training_rows(inputs.prompts(), config.sft)))
        if config.dataset.chat_template_kwargs:
            rows = rows.add_column("chat_template_kwargs", [config.dataset.chat_template_kwargs] * len(rows))
        sys.stdout.write(f"rl-sft: {len(rows)} rows\n")
        train(inputs.model_folder, arguments, lora, rows).save_pretrained(partial)
        AdapterFolder.read(partial, "rl-sft")
    sys.stdout.write(f"rl-sft: wrote {to}; start from it with --set lora.init_from={to}\n")
    return ExitCode.OK
