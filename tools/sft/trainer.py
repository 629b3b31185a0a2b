"""Supervised training of the run's LoRA with TRL's SFTTrainer.

Guarantee: every option of `trl.SFTConfig` that is not refused is TRL's own; only the completions count in the loss unless
`sft.completion_only_loss` says otherwise.
"""

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import PrinterCallback, TrainerCallback

from consumer.prompts.tokenizer import load_tokenizer
from consumer.training.import_guard import without_vllm
from consumer.training.trl_arguments import REFUSALS
from protocol.config.library_rules import for_library
from protocol.config.library_section import build
from protocol.config.run import RunConfig
from protocol.errors import ConfigError

with without_vllm():
    from trl import SFTConfig, SFTTrainer


def build_sft_arguments(config: RunConfig, output_dir: Path, *, on_gpu: bool) -> SFTConfig:
    """
    Raises:
        ConfigError: TRL does not know a key or refuses a value.
    """
    chosen = for_library("sft", config.sft)
    options = chosen.pop("model_init_kwargs", None) or {}
    if not isinstance(options, dict):
        raise ConfigError(f"sft.model_init_kwargs: expected a mapping (got {options!r})")
    defaults = {"report_to": "none", "bf16": on_gpu and config.model.dtype == "bfloat16" and not chosen.get("fp16")}
    return build(
        "sft",
        SFTConfig,
        defaults | chosen,
        output_dir=str(output_dir),
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        use_cpu=not on_gpu,
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": config.model.dtype} | options,
    )


def train(model_folder: Path, arguments: SFTConfig, lora: LoraConfig, rows: Dataset) -> PeftModel:
    """
    Args:
        rows: with `prompt` and `completion`, and perhaps `chat_template_kwargs`.

    Returns:
        The model with the trained adapter.

    Raises:
        ConfigError: TRL or PEFT refused.
    """
    try:
        trainer = SFTTrainer(
            model=str(model_folder),
            args=arguments,
            train_dataset=rows,
            processing_class=load_tokenizer(model_folder, trust_remote_code=arguments.trust_remote_code),
            peft_config=lora,
            callbacks=[_Lines()],
        )
    except REFUSALS as error:
        raise ConfigError(f"TRL or PEFT refused to build the trainer: {error}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.accelerator.unwrap_model(trainer.model)


class _Lines(TrainerCallback):
    """One line per logged step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            accuracy = f"  token accuracy {logs['mean_token_accuracy']:.3f}" if "mean_token_accuracy" in logs else ""
            line = f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.4f}{accuracy}"
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
