"""TRL's AsyncGRPOTrainer on one of `benchmarks.tasks`, with a vLLM server that runs.

    python -m benchmarks.async_trl TASK RUN_DIR URL INFLIGHT SAVE_STEPS [SECTION.KEY=VALUE...]

Guarantee: model, prompts, reward, batch, LoRA, optimizer, sampling and staleness are those of the task's configuration. A step
trains as many completions as ours: by default TRL ends it at as many tokens as the server's longest sequence. What it has for
CUDA alone is replaced (`benchmarks.trainer_step_async`). Checkpoints have what ours have. `steps.jsonl` has a line for each step.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import AutoTokenizer, TrainerCallback

from benchmarks.tasks import TASKS, reward_of
from benchmarks.trainer_step_async import replace_kernels
from benchmarks.whole_runs import BEGAN
from consumer.learn.options import build_lora
from protocol.config.loader import load_config
from protocol.runtime.processes import block_import

with block_import("vllm"):
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

_COLUMNS = {
    "reward": "reward",
    "kl": "kl",
    "wait_s": "perf/rollout_wait_s",
    "step_s": "perf/fwd_bwd_s",
    "sync_s": "perf/weight_sync_s",
    "tokens": "batch/trained_tokens_per_step",
    "dropped": "sample/dropped_stale_total",
}


class _Steps(TrainerCallback):
    """Notes when TRL's rollout process has begun, and writes a line when TRL logs a step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (self._folder / BEGAN).write_text(str(time.time()))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            line = {"step": state.global_step, "t": time.time()}
            line |= {name: logs.get(key) for name, key in _COLUMNS.items()}
            with (self._folder / "steps.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")


class MessagesReward:
    """The reward of a task's configuration as TRL calls it: with completions that are lists of messages.

    It is pickled for TRL's rollout process, which loads the reward itself, and awaits it in its main thread: others have no limit
    of time by a signal.
    """

    def __init__(self, task_name: str) -> None:
        self.__name__ = task_name

    async def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return reward_of(TASKS[self.__name__].config)(
            completions=[one[-1]["content"] for one in completions], **columns
        )


def main(task_name: str, run_dir: Path, url: str, inflight: int, save_steps: int, settings: list[str]) -> None:
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    replace_kernels(on_gpu=on_gpu)
    task = TASKS[task_name]
    config = load_config(task.config, [*settings, f"run_dir={run_dir}"])
    tokenizer = AutoTokenizer.from_pretrained(task.base, padding_side="left")
    task.tell_template(tokenizer)
    rows = datasets.load_dataset("json", data_files=str(task.dataset), split="train")
    rows = rows.shuffle(seed=config.seed)
    if task.template is not None:
        rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    chosen, sampling = config.trainer, config.sampling
    trainer = AsyncGRPOTrainer(
        model=str(task.base),
        reward_funcs=MessagesReward(task_name),
        args=AsyncGRPOConfig(
            output_dir=str(run_dir / "trl"), seed=config.seed, max_steps=chosen["max_steps"], dtype=config.model.dtype,
            use_cpu=not on_gpu, bf16=on_gpu, learning_rate=chosen["learning_rate"],
            lr_scheduler_type=chosen["lr_scheduler_type"], warmup_steps=chosen["warmup_steps"], max_grad_norm=1.0,
            per_device_train_batch_size=config.completions_per_step, token_budget=0, num_generations=sampling.num_generations,
            max_completion_length=sampling.max_completion_length, temperature=sampling.temperature,
            vllm_server_base_url=url, max_staleness=config.pipeline.max_staleness, max_inflight_tasks=inflight,
            gradient_checkpointing=False, save_strategy="steps", save_steps=save_steps,
            report_to=[], logging_steps=1, disable_tqdm=True,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=build_lora(config),
    )  # fmt: skip
    trainer.add_callback(_Steps(run_dir))  # behind TRL's own, which starts the rollout process and waits for it
    trainer.train()
    trainer.save_model(str(run_dir / "adapter"))


if __name__ == "__main__":
    name, folder, url, inflight, save_steps, *settings = sys.argv[1:]
    main(name, Path(folder), url, int(inflight), int(save_steps), settings)
