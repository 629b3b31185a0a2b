"""One side of `benchmarks/trainer_step.py`, in a process of its own: our trainer, or one of TRL's two; and one process of a side
of `benchmarks/ranks.py`, which has several.

Guarantee: equal arguments give both sides the same weights and the same batch. Only generation and rewards are replaced in TRL's;
its step begins where it would have its completions and ends with the gradient, as ours does.
"""

import datetime
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.trainer_step_limit import products, shares
from consumer.learn.options import build_arguments, build_lora
from consumer.learn.trainer import SlipstreamTrainer
from consumer.ranks.exchange import ALONE, ProcessRanks, Ranks, Train
from protocol.command_line import leave
from protocol.config.run import RunConfig
from protocol.runtime.processes import block_import
from replay.batch_selection import TrainingBatch
from replay.groups import RolloutGroup
from tests.integration.models import char_tokenizer

with block_import("vllm"):
    from trl import GRPOTrainer


class Place(NamedTuple):
    """Which process of its side this is. Those of a side with several find one another at `port` of loopback."""

    rank: int = 0
    world: int = 1
    port: int = 0

    def ranks(self, device: str) -> Ranks:
        if self.world == 1:
            return ALONE
        wait = datetime.timedelta(minutes=10)
        store = dist.TCPStore("127.0.0.1", self.port, self.world, is_master=self.rank == 0, timeout=wait)
        return ProcessRanks(store, self.rank, self.world, torch.device(device), wait.total_seconds())

    def environment(self) -> dict[str, str]:
        """What accelerate wants to find."""
        names = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.world, "MASTER_PORT": self.port}
        return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in names.items()}


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
                lease_id=str(number),
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
            "model": {
                "path": str(folder / "model"),
                "dtype": size["model"]["dtype"],
                "quantization": size.get("quantization"),
            },
            "dataset": {"path": "none"},
            "rewards": {"functions": [{"function": "rewards:score"}]},
            "sampling": {"num_generations": size["num_generations"], "max_completion_length": size["max_tokens"]},
            "pipeline": {
                "groups_per_step": size["num_prompts"],
                "trainer_tokens_per_micro_batch": size["tokens_per_micro_batch"],
                "shard_base": size.get("shard_base", "none"),
            },
            "correction": {"preset": "token_truncate" if size["correct"] else "none"},
            "trainer": {"gradient_checkpointing": False, "max_steps": 1, "loss_type": size.get("loss_type", "dapo")}
            | size.get("trainer", {})
            | trainer,
        }
    )


def save_model(size: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"model_type": "qwen2", "tie_word_embeddings": True, "max_position_embeddings": 8192} | size["model"]
    kind, _ = shape.pop("model_type"), shape.pop("dtype")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    model.to(getattr(torch, size.get("dtype_of_file", size["model"]["dtype"]))).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def ours(size: dict[str, Any], folder: Path, place: Place) -> tuple[Any, Callable[[], torch.Tensor]]:
    config = config_of(size, folder)
    arguments = build_arguments(config, on_gpu=size["device"] == "cuda", num_prompts=1000)
    trainer = SlipstreamTrainer(
        config, arguments, build_lora(config), folder / "model", [], lambda step, staged, write: write(),
        place.ranks(size["device"]),
    )  # fmt: skip
    groups = groups_of(size)
    trainer.current_gradient_accumulation_steps = 1  # as transformers' loop sets it
    return trainer, lambda: trainer.training_step(trainer.model, trainer.recipe.tensors(groups), None)


def trl(size: dict[str, Any], folder: Path, place: Place) -> tuple[Any, Callable[[], torch.Tensor]]:
    groups, config = groups_of(size), config_of(size, folder)
    arguments = build_arguments(config, on_gpu=size["device"] == "cuda", num_prompts=1000)
    num_rows = config.completions_per_step // place.world
    width = max(len(group.prompt_ids) for group in groups) + max(int(g.completion_lengths.max()) for g in groups)
    fitting = [n for n in range(1, num_rows + 1) if num_rows % n == 0 and n * width <= size["padded_tokens"]]
    rows = max(fitting, default=1)
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = rows, num_rows // rows
    arguments.steps_per_generation = num_rows // rows
    if place.world > 1:  # only now: ours refuse to be one of several that somebody else started
        os.environ.update(place.environment())
        AcceleratorState._reset_state(reset_partial_state=True)
        arguments = replace(arguments, generation_batch_size=None)
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
    here = len(groups) // place.world
    own = groups[place.rank * here : (place.rank + 1) * here]
    generated = _generated(own, with_logprobs=size["correct"])
    rewards = torch.from_numpy(np.concatenate([group.rewards for group in groups]))
    if place.world > 1:
        trainer.model_wrapped = trainer.accelerator.prepare(trainer.model)
    trainer._generate = lambda _: generated
    trainer._calculate_rewards = lambda *_: rewards.to(trainer.accelerator.device)
    trainer.current_gradient_accumulation_steps = num_rows // rows

    def step() -> torch.Tensor:
        batch = [{"prompt": ""}] * num_rows
        losses = []
        for number in range(1, num_rows // rows + 1):
            trainer.accelerator.gradient_state._set_sync_gradients(number == num_rows // rows)
            losses.append(trainer.training_step(trainer.model_wrapped, batch, None))
        return trainer.accelerator.gather(torch.stack(losses).sum()[None]).mean()

    return trainer, step


def trl_async(size: dict[str, Any], folder: Path, place: Place) -> tuple[Any, Callable[[], torch.Tensor]]:
    from benchmarks import trainer_step_async  # only here: on a CPU it replaces parts of TRL

    return trainer_step_async.trl_async(
        groups_of(size), folder, config_of(size, folder), on_gpu=size["device"] == "cuda"
    )


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
    """What is taken above what was taken when this was made, in MB: of the GPU, or resident."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        gc.collect()
        self._before = torch.cuda.memory_allocated() if self._cuda else _resident("VmRSS")

    def reset(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def now_mb(self) -> float:
        now = torch.cuda.memory_allocated() if self._cuda else _resident("VmRSS")
        return (now - self._before) / 2**20

    def peak_mb(self) -> float:
        """Since `reset` was last called, of any of these."""
        peak = torch.cuda.max_memory_allocated() if self._cuda else _resident("VmHWM")
        return (peak - self._before) / 2**20


def _resident(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def exchange(ranks: Ranks, groups: list[RolloutGroup]) -> dict[str, float]:
    """What two exchanges of a step cost, in seconds: the gradients of a LoRA of 80 MB, and the plan."""
    gradient = torch.ones(20 * 2**20)
    seconds: dict[str, list[float]] = {"gradients_s": [], "plan_s": []}
    for _ in range(5):
        began = time.perf_counter()
        ranks.add([gradient])
        seconds["gradients_s"].append(time.perf_counter() - began)
        began = time.perf_counter()
        ranks.share(Train.of(TrainingBatch(1, 1, 1, groups, len(groups))) if ranks.rank == 0 else None)
        seconds["plan_s"].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


class _Asked:
    """Answers what the benchmark asks of one side, a line of JSON each."""

    def __init__(self, trainer: Any, step: Callable[[], torch.Tensor], size: dict[str, Any], whole: _Memory) -> None:
        self._trainer, self._step, self._size, self._whole = trainer, step, size, whole
        self._groups, self._memory = groups_of(size), _Memory(size["device"])
        self._passes: list[int] = []  # positions of each pass of the last step
        self._again = trainer.args.gradient_checkpointing
        base = trainer.model.get_base_model()
        base.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: self._passes.append(inputs[0].numel()))
        if self._again:  # transformers does so when it begins to train
            base.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        trainer.model.train()

    def facts(self) -> dict[str, Any]:
        groups, base = self._groups, self._trainer.model.get_base_model()
        return {
            "rows": sum(group.num_completions for group in groups),
            "tokens": sum(group.num_tokens + len(group.prompt_ids) * group.num_completions for group in groups),
            "parameters": sum(value.numel() for value in base.parameters()),
            "checkpoints": base.is_gradient_checkpointing,
        }

    def step(self) -> dict[str, Any]:
        cuda = self._size["device"] == "cuda"
        self._memory.reset()
        self._passes.clear()
        wall, busy = time.perf_counter(), time.process_time()
        loss = self._step()
        if cuda:
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - wall
        busy_s = wall_s if cuda else time.process_time() - busy
        model, memory = self._trainer.model, self._memory
        gradients = [value.grad.float().norm() for value in model.parameters() if value.grad is not None]
        model.zero_grad()
        return {
            "loss": loss.item(), "gradient_norm": torch.stack(gradients).norm().item(),
            "wall_s": wall_s, "busy_s": busy_s, "passes": len(self._passes), "positions": sum(self._passes),
            "peak_mb": memory.peak_mb(), "resident_mb": _resident("VmHWM") / 2**20,
            "model_mb": self._whole.now_mb(), "model_peak_mb": self._whole.peak_mb(),
        }  # fmt: skip

    def limit(self) -> dict[str, Any]:
        busy = time.process_time()
        num_trained = sum(group.num_tokens for group in self._groups)
        products(self._trainer.model.get_base_model(), self._passes, num_trained, again=self._again)
        return {"busy_s": time.process_time() - busy}

    def profile(self) -> dict[str, Any]:
        return shares(self._step, self._trainer.model.get_base_model())

    def exchange(self) -> dict[str, Any]:
        return exchange(self._trainer._ranks, self._groups)


def main() -> None:
    side, size, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    place = Place(*map(int, sys.argv[4:]))
    mine = folder / f"{side}-{place.world}-{place.rank}"
    save_model(size, mine / "model")
    whole = _Memory(size["device"])
    trainer, step = {"ours": ours, "trl": trl, "trl_async": trl_async}[side](size, mine, place)
    torch.manual_seed(1)
    with torch.no_grad():
        for _, value in sorted(trainer.model.named_parameters()):
            if value.requires_grad:
                value.copy_(0.02 * torch.randn(value.shape))
    asked = _Asked(trainer, step, size, whole)
    print(json.dumps(asked.facts()), flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(asked, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
    leave(0)
