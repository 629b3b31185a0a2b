"""TRL's asynchronous trainer as a side of `benchmarks/trainer_step.py`, from the samples in its queue to the gradient.

Guarantee: trie packing, batcher, collator, loss and passes are TRL's; the batch and its advantages are those of the other sides.
On CUDA the FlashAttention is that of the package flash-attn, which ours takes too, where TRL would fetch one from Hugging Face's
hub. Three things that TRL has for CUDA alone are replaced on a CPU, and nothing else:

- FlashAttention 3 of Hugging Face's hub, by torch's SDPA over segments of similar lengths, padded together;
- the name of the device, which its metric of used FLOPs asks for, by none;
- the LM head then scores labelled positions alone, as on CUDA, which is in TRL's favour.
"""

import importlib
import os
import queue
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer

from consumer.learn.options import build_lora
from protocol.config.run import RunConfig
from protocol.runtime.processes import block_import
from replay.advantages import advantages
from replay.groups import RolloutGroup

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
with block_import("vllm"):
    import trl.trainer.utils
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

_WORTH_A_CALL = 4096  # products of a query with a key that are padding, above which segments are computed apart


class _Nothing:
    """Stands for TRL's rollout worker and weight transfer: a step needs neither."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def trl_async(
    groups: list[RolloutGroup], folder: Path, config: RunConfig, *, on_gpu: bool
) -> tuple[Any, Callable[[], torch.Tensor]]:
    """The trainer, and its step over these groups."""
    replace_kernels(on_gpu=on_gpu)
    tokens = int(config.pipeline.trainer_tokens_per_micro_batch)
    samples = [sample for number, group in enumerate(groups) for sample in samples_of(number, group)]
    trainer = AsyncGRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda **_: [],
        args=AsyncGRPOConfig(
            output_dir=str(folder / "trl"), max_steps=1, token_budget=tokens, report_to=[], bf16=False, use_cpu=not on_gpu,
            dtype=config.model.dtype, gradient_checkpointing=config.trainer["gradient_checkpointing"],
        ),
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        peft_config=build_lora(config),
        rollout_worker=_Nothing(),
        weight_transfer=_Nothing(),
    )  # fmt: skip
    seen = trainer._metrics["train"]
    collate = async_grpo_trainer.DataCollatorForRollout(trainer.processing_class.pad_token_id, metrics=seen)

    def rows() -> Iterator[list[packing.TreeRow]]:
        # The batcher keeps a row open for what is still to come, so a sample that fits beside no other ends the step.
        last = samples[0] | {"input_ids": np.full(tokens, -1), "group_id": -1}
        yield from async_grpo_trainer.TokenBudgetBatcher(chain(samples, [last]), 1, tokens, seen)

    num_passes, num_trained = len(list(rows())), sum(int(sample["completion_mask"].sum()) for sample in samples)
    trainer.current_gradient_accumulation_steps = num_passes
    known = False

    def step() -> torch.Tensor:
        nonlocal known
        if not known:
            for row in rows():
                _set_own_logprobs(trainer, row[0], collate([row]))
            known = True
        total = torch.zeros((), device=trainer.accelerator.device)
        for row in rows():
            inputs = collate([row])
            # TRL takes the mean of each pass, and then of the passes; the other sides that of all tokens of the step.
            inputs["global_n_tokens"] = torch.full((1,), num_trained / num_passes)
            total = total + trainer.training_step(trainer.model, inputs, None)
            seen.clear()
        return total

    return trainer, step


def samples_of(number: int, group: RolloutGroup) -> Iterator[dict[str, Any]]:
    """Yield what TRL's rollout worker would put into its queue, with the advantages of GRPOTrainer."""
    values = advantages(group.rewards, np.ones(1), group.num_completions).tolist()
    ends = group.completion_lengths.cumsum()[:-1]
    for ids, value in zip(np.split(group.completion_ids, ends), values, strict=True):
        prompt = len(group.prompt_ids)
        yield {
            "input_ids": np.concatenate([group.prompt_ids, ids]).astype(np.int64),
            "completion_mask": np.repeat([0, 1], [prompt, len(ids)]),
            "old_log_probs": np.zeros(prompt + len(ids), np.float32),
            "advantage": value,
            "group_id": number,
            "metrics": {"reward": 0.0},
        }


@torch.no_grad()
def _set_own_logprobs(trainer: Any, row: packing.TreeRow, inputs: dict[str, torch.Tensor]) -> None:
    """Make the samples on-policy, as they are on the other sides."""
    inputs = trainer._prepare_inputs(inputs)
    tree = {name: value[0] for name, value in inputs.items() if name.startswith(("tree_kv", "tree_cu"))}
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), inputs["tree_max_seqlens"][0].tolist(), strict=True))
    ids = {name: inputs[name] for name in ("input_ids", "position_ids", "shift_labels")}
    found = trainer.model(fused_lm_head=True, **ids, **tree, **longest).log_probs.flatten()
    own, of_sample = (each.cpu().numpy() for each in (found[inputs["token_index"][0]], inputs["segment_id"][0]))
    for number, sample in enumerate(row.samples):
        sample["old_log_probs"][sample["completion_mask"] == 1] = own[of_sample == number]


def replace_kernels(*, on_gpu: bool) -> None:
    """Give TRL the kernels that the module's guarantee names."""
    if on_gpu:
        packing._flash_attn = lambda: importlib.import_module("flash_attn")
        return
    packing._flash_attn = lambda: Kernel
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    trl.trainer.utils._use_triton = lambda device: (
        True
    )  # only whether labelled positions alone are scored follows from it


class _Segments:
    """Segments of a packed row that are computed together, and their places."""

    def __init__(self, starts_q: torch.Tensor, starts_k: torch.Tensor) -> None:
        self.of = starts_q
        lengths = zip(starts_q.diff().tolist(), starts_k.diff().tolist(), strict=True)
        segments = sorted(
            (*n, *at) for n, at in zip(lengths, zip(starts_q.tolist(), starts_k.tolist(), strict=False), strict=False)
        )
        self.parts: list[tuple[torch.Tensor, ...]] = []
        together: list[tuple[int, ...]] = []
        for segment in segments:
            wider = [*together, segment]
            real = sum(q * k for q, k, *_ in wider)
            padded = len(wider) * max(q for q, *_ in wider) * max(k for _, k, *_ in wider)
            if together and padded > 2 * real and padded - real > _WORTH_A_CALL:
                self._add(together)
                wider = [segment]
            together = wider
        self._add(together)
        self.inverse = torch.cat([places for *_, places in self.parts]).argsort()

    def _add(self, segments: list[tuple[int, ...]]) -> None:
        num_q, num_k, at_q, at_k = (column[:, None] for column in torch.tensor(segments).T)
        q, k = torch.arange(int(num_q.max())), torch.arange(int(num_k.max()))
        is_q = q < num_q
        sees = (k <= (q + num_k - num_q)[:, :, None]) & (k < num_k[:, None]) | ~is_q[:, :, None]
        of_q = torch.where(is_q, at_q + q, at_q)
        self.parts.append((of_q, torch.where(k < num_k, at_k + k, at_k), sees[:, None], is_q, of_q[is_q]))


class Kernel:
    """Stands for the module of FlashAttention 3."""

    _segments: list[_Segments] = []  # of the last pass  # noqa: RUF012

    @classmethod
    def flash_attn_varlen_func(
        cls,
        q: Any,
        k: Any,
        v: Any,
        starts_q: Any,
        starts_k: Any,
        *_: int,
        softmax_scale: float,
        causal: bool,
        window_size: Any,
    ) -> torch.Tensor:
        """(tokens, heads, size) for causal attention, aligned at the last key of each segment."""
        assert causal
        assert window_size == (-1, -1)
        if not cls._segments or cls._segments[0].of is not starts_q:
            cls._segments[:] = [_Segments(starts_q, starts_k)]
        [segments] = cls._segments
        found = []
        for of_q, of_k, sees, is_q, _places in segments.parts:
            heads = (q[of_q].transpose(1, 2), k[of_k].transpose(1, 2), v[of_k].transpose(1, 2))
            out = scaled_dot_product_attention(*heads, attn_mask=sees, scale=softmax_scale, enable_gqa=True)
            found.append(out.transpose(1, 2)[is_q])
        return torch.cat(found)[segments.inverse]
