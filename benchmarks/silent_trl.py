"""TRL's AsyncGRPOTrainer on the demo's task, for `benchmarks.silent`.

    python -m benchmarks.silent_trl RUN_DIR URL DTYPE STEPS

Guarantee: model, prompts, reward, batch, LoRA, optimizer and staleness are those of the demo, whose configuration it reads.
32 tasks are in flight, at which it was fastest here. What it has for CUDA alone is replaced (`benchmarks.trainer_step_async`).
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import transformers
from transformers import AutoTokenizer, TrainerCallback

from benchmarks.trainer_step_async import on_cpu
from consumer.learn.options import build_lora
from protocol.config.loader import load_config
from protocol.runtime.processes import block_import

with block_import("vllm"):
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

CONFIG = "examples/arithmetic/run.yaml"


class _Steps(TrainerCallback):
    """Writes {"step", "reward", "kl"} when TRL logs a step."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            with self._file.open("a") as out:
                out.write(
                    json.dumps({"step": state.global_step, "reward": logs["reward"], "kl": logs.get("kl")}) + "\n"
                )


def exact_match(prompts: Any, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(one[-1]["content"] == right) for one, right in zip(completions, answer, strict=True)]


def main(run_dir: Path, url: str, dtype: str, steps: int) -> None:
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    on_cpu()
    config = load_config(CONFIG, [f"run_dir={run_dir}"])
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    # It takes prompts as messages, and has to be told how an answer ends.
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    field = {"close_pattern": r"<eos>\s*", "content": "text"}
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": "=", "fields": {"content": field}}
    rows = datasets.load_dataset("json", data_files=config.dataset.path, split="train").shuffle(seed=config.seed)
    chosen = config.trainer
    trainer = AsyncGRPOTrainer(
        model=config.model.path,
        reward_funcs=exact_match,
        args=AsyncGRPOConfig(
            output_dir=str(run_dir / "trl"), seed=config.seed, max_steps=steps, dtype=dtype, use_cpu=True, bf16=False,
            learning_rate=chosen["learning_rate"],
            lr_scheduler_type=chosen["lr_scheduler_type"], warmup_steps=chosen["warmup_steps"], max_grad_norm=1.0,
            per_device_train_batch_size=config.completions_per_step, num_generations=config.sampling.num_generations,
            max_completion_length=config.sampling.max_completion_length, temperature=1.0, vllm_server_base_url=url,
            max_staleness=config.pipeline.max_staleness, max_inflight_tasks=32, gradient_checkpointing=False,
            save_strategy="no", report_to=[], logging_steps=1, disable_tqdm=True,
        ),
        train_dataset=rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        processing_class=tokenizer,
        peft_config=build_lora(config),
        callbacks=[_Steps(run_dir / "steps.jsonl")],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(run_dir / "adapter"))


if __name__ == "__main__":
    folder, url, dtype, steps = sys.argv[1:]
    main(Path(folder), url, dtype, int(steps))
