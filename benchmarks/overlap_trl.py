"""The third arm of `benchmarks.overlap`: TRL's own GRPOTrainer with transformers' generation, on every core.

    python -m benchmarks.overlap_trl CONFIG RUN_DIR [SECTION.KEY=VALUE...]

Guarantee: same model, prompts, reward, batch, LoRA and optimizer as the pair, whose configuration it reads; steps.jsonl has
one line per step.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import transformers
from transformers import TrainerCallback

from consumer.learn.options import GRPOConfig, build_lora, chosen_values, reserved_values
from protocol.config.functions import load_function
from protocol.config.library_section import build
from protocol.config.loader import load_config
from protocol.runtime.processes import block_import

with block_import("vllm"):
    from trl import GRPOTrainer

_ROWS = 32  # of a micro-batch; TRL pads all of them to the longest completion of the step


class _Steps(TrainerCallback):
    """Writes {"step", "t", "reward"} when TRL logs a step."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            line = {"step": state.global_step, "t": time.time(), "reward": logs["reward"]}
            with self._file.open("a") as out:
                out.write(json.dumps(line) + "\n")


def main(config_file: str, run_dir: Path, settings: list[str]) -> None:
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    config = load_config(config_file, [*settings, f"run_dir={run_dir}"])
    values = chosen_values(config, on_gpu=False) | reserved_values(config, on_gpu=False)
    values |= {
        "per_device_train_batch_size": _ROWS,
        "gradient_accumulation_steps": config.completions_per_step // _ROWS,
    }
    trainer = GRPOTrainer(
        model=config.model.path,
        reward_funcs=[load_function(str(one.function), "rewards") for one in config.rewards.functions],
        args=build("trainer", GRPOConfig, values),
        train_dataset=datasets.load_dataset("json", data_files=config.dataset.path, split="train"),
        peft_config=build_lora(config),
        callbacks=[_Steps(run_dir / "steps.jsonl")],
    )
    trainer.train()
    trainer.save_model(str(run_dir / "adapter"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
