"""One side of `benchmarks/trainer_step.py`, in a process of its own: our trainer, or TRL's.

Guarantee: equal arguments give both sides the same weights and the same batch. Only generation and rewards are replaced in TRL's;
its step begins where it would have its completions and ends with the gradient, as ours does.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from consumer.training.trainer import SlipstreamTrainer
from consumer.training.trl_arguments import build_arguments, build_lora
from consumer.training.trl_loss import GRPOTrainer
from protocol.config.run import RunConfig
from replay.groups import RolloutGroup
from tests.integration.models import char_tokenizer


def groups_of(size: dict[str, Any]) -> list[RolloutGroup]:
    draw = np.random.default_rng(0)
    vocab, count = size["model"]["vocab_size"], size["num_generations"]
    groups = []
    for number in range(size["num_prompts"]):
        lengths = draw.lognormal(np.log(size["median_tokens"]), 0.8, count).astype(np.int32)
        lengths = lengths.clip(1, size["max_tokens"])
        prompt_tokens = int(draw.integers(size["prompt_tokens"] // 2, size["prompt_tokens"] * 3 // 2 + 1))
        groups.append(
            RolloutGroup(
                group_id=str(number),
                policy_version=0,
                prompt_ids=draw.integers(3, vocab, prompt_tokens).astype(np.int32),
                completion_lengths=lengths,
                completion_ids=draw.integers(3, vocab, lengths.sum()).astype(np.int32),
                logprobs=-np.full(lengths.sum(), np.log(vocab), np.float32),
                rewards=draw.normal(size=(count, 1)).astype(np.float32),
                truncated=lengths == size["max_tokens"],
            )
        )
    return groups


def config_of(size: dict[str, Any], folder: Path, **trainer: Any) -> RunConfig:
    if size["attention"]:
        trainer["model_init_kwargs"] = {"attn_implementation": size["attention"]}
    return RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "model": {"path": str(folder / "model"), "dtype": size["model"]["dtype"]},
            "dataset": {"path": "none"},
            "rewards": {"functions": [{"function": "rewards:score"}]},
            "sampling": {"num_generations": size["num_generations"], "max_completion_length": size["max_tokens"]},
            "pipeline": {
                "groups_per_step": size["num_prompts"],
                "trainer_tokens_per_micro_batch": size["tokens_per_micro_batch"],
            },
            "correction": {"preset": "token_truncate" if size["correct"] else "none"},
            "trainer": {"gradient_checkpointing": False, "max_steps": 1} | trainer,
        }
    )


def save_model(size: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {name: value for name, value in size["model"].items() if name != "dtype"}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=8192))
    model.to(getattr(torch, size["model"]["dtype"])).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def ours(size: dict[str, Any], folder: Path) -> tuple[Any, Callable[[], torch.Tensor], dict[str, Any]]:
    config = config_of(size, folder)
    arguments = build_arguments(config, on_gpu=size["device"] == "cuda", num_prompts=1000)
    trainer = SlipstreamTrainer(
        config, arguments, build_lora(config), folder / "model", [], lambda step, staged, write: write()
    )
    groups = groups_of(size)
    facts = {"passes": len(trainer.recipe.tensors(groups))}
    return trainer, lambda: trainer.training_step(trainer.model, trainer.recipe.tensors(groups), None), facts


def trl(size: dict[str, Any], folder: Path) -> tuple[Any, Callable[[], torch.Tensor], dict[str, Any]]:
    groups, config = groups_of(size), config_of(size, folder)
    arguments = build_arguments(config, on_gpu=size["device"] == "cuda", num_prompts=1000)
    num_rows = config.completions_per_step
    width = max(len(group.prompt_ids) for group in groups) + max(int(g.completion_lengths.max()) for g in groups)
    fitting = [n for n in range(1, num_rows + 1) if num_rows % n == 0 and n * width <= size["tokens_per_micro_batch"]]
    rows = max(fitting, default=1)
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = rows, num_rows // rows
    arguments.steps_per_generation = num_rows // rows
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=[_score],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        peft_config=build_lora(config),
    )
    if size["correct"]:
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        trainer.vllm_importance_sampling_mode = "token_truncate"
        trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = 0.0, 3.0
    generated = _generated(groups, with_logprobs=size["correct"])
    rewards = torch.from_numpy(np.concatenate([group.rewards for group in groups]))
    trainer._generate = lambda _: generated
    trainer._calculate_rewards = lambda *_: rewards.to(trainer.accelerator.device)
    trainer.current_gradient_accumulation_steps = num_rows // rows

    def step() -> torch.Tensor:
        batch = [{"prompt": ""}] * num_rows
        losses = [trainer.training_step(trainer.model, batch, None) for _ in range(num_rows // rows)]
        return torch.stack(losses).sum()

    return trainer, step, {"passes": num_rows // rows * (2 if size["correct"] else 1), "rows_per_pass": rows}


def _generated(groups: list[RolloutGroup], *, with_logprobs: bool) -> tuple[Any, ...]:
    """What TRL's `_generate` returns."""
    prompts = [group.prompt_ids.tolist() for group in groups for _ in range(group.num_completions)]
    completions: list[list[int]] = []
    logprobs: list[list[float]] = []
    for group in groups:
        ends = group.completion_lengths.cumsum()[:-1]
        completions += [part.tolist() for part in np.split(group.completion_ids, ends)]
        logprobs += [part.tolist() for part in np.split(group.logprobs, ends)]
    texts = [""] * len(completions)
    return prompts, completions, None, texts, logprobs if with_logprobs else None, {}, None, None


def _score(**_: Any) -> list[float]:
    raise AssertionError("rewards come with the groups")


class _Memory:
    """Peak above what is there before the first step, in MB: of the GPU, or resident."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._before = torch.cuda.memory_allocated() if self._cuda else _resident("VmRSS")

    def reset(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_mb(self) -> float:
        peak = torch.cuda.max_memory_allocated() if self._cuda else _resident("VmHWM")
        return (peak - self._before) / 2**20


def _resident(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def main() -> None:
    side, size, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    mine = folder / side
    save_model(size, mine / "model")
    trainer, step, facts = {"ours": ours, "trl": trl}[side](size, mine)
    torch.manual_seed(1)
    trainable = [(name, value) for name, value in sorted(trainer.model.named_parameters()) if value.requires_grad]
    with torch.no_grad():
        for _, value in trainable:
            value.copy_(0.02 * torch.randn(value.shape))
    groups = groups_of(size)
    facts["rows"] = sum(group.num_completions for group in groups)
    facts["tokens"] = sum(group.num_tokens + len(group.prompt_ids) * group.num_completions for group in groups)
    facts["parameters"] = sum(value.numel() for value in trainer.model.get_base_model().parameters())
    print(json.dumps(facts), flush=True)
    memory, cuda = _Memory(size["device"]), size["device"] == "cuda"
    for _ in sys.stdin:
        memory.reset()
        wall, busy = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
        loss = step()
        if cuda:
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - wall
        busy_s = wall_s if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_utime - busy
        found = {"loss": loss.item(), "wall_s": wall_s, "busy_s": busy_s, "peak_mb": memory.peak_mb()}
        trainer.model.zero_grad()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
