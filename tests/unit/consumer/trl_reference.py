"""TRL's own GRPOTrainer on groups that were generated elsewhere: the second implementation that ours is compared with.

Only generation and the reward call are replaced. Padding, truncation masks, advantages, old and reference log-probs, the
importance ratio (as TRL computes it beside vLLM) and the loss are TRL's.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoTokenizer

from consumer.learn.importance import Correction, importance_factors, resolve
from consumer.learn.loss import Pass, part_of_loss
from consumer.learn.micro_batches import MicroBatch
from consumer.learn.options import GRPOConfig, build_arguments, build_lora
from consumer.learn.statistics import TrainedStep
from consumer.learn.trainer import SlipstreamTrainer
from consumer.ranks.exchange import ALONE, Ranks
from protocol.config.run import RunConfig
from protocol.runtime.processes import block_import
from replay.groups import RolloutGroup
from replay.journal.schema import MicroBatchPlan

with block_import("vllm"):
    from trl import GRPOTrainer

LORA_STD = 0.1


def slipstream_trainer(config: RunConfig, model: Path, ranks: Ranks = ALONE) -> SlipstreamTrainer:
    """Ours, with LoRA weights that all matter (PEFT starts half of them at zero), ready for `_compute_loss`."""
    arguments = build_arguments(config, on_gpu=False, num_prompts=8)
    return _ready(
        SlipstreamTrainer(config, arguments, build_lora(config), model, [], lambda step, staged, write: write(), ranks)
    )


def trl_trainer(config: RunConfig, model: Path, *, correction: bool = True) -> GRPOTrainer:
    """TRL's, of the same configuration and weights."""
    arguments: GRPOConfig = build_arguments(config, on_gpu=False, num_prompts=8)
    names = [function.name for function in config.rewards.functions]
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=[_named(name) for name in names],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=build_lora(config),
    )
    trainer.reward_weights = torch.tensor(config.reward_weights)
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_correction = correction
    correct_as(trainer, resolve(config.correction))
    return _ready(trainer)


def correct_as(trainer: GRPOTrainer, correction: Correction) -> None:
    """TRL knows truncation and masking of the ratios of tokens and of their products."""
    trainer.vllm_importance_sampling_mode = f"{correction.level}_{correction.action}"
    trainer.vllm_importance_sampling_clip_min = correction.ratio_min
    trainer.vllm_importance_sampling_clip_max = correction.ratio_max


def trl_inputs(trainer: GRPOTrainer, groups: list[RolloutGroup]) -> MicroBatch:
    """What TRL's `_generate_and_score_completions` makes of these groups."""
    prompts = [group.prompt_ids.tolist() for group in groups for _ in range(group.num_completions)]
    completions: list[list[int]] = []
    logprobs: list[list[float]] = []
    for group in groups:
        lengths = group.completion_lengths.tolist()
        completions += [part.tolist() for part in torch.tensor(group.completion_ids).split(lengths)]
        logprobs += [part.tolist() for part in torch.tensor(group.logprobs).split(lengths)]
    rewards = torch.cat([torch.tensor(group.rewards, dtype=torch.get_default_dtype()) for group in groups])
    texts = ["" for _ in completions]
    tool_mask = None
    if any(group.sampled is not None for group in groups):
        tool_mask = [group.is_sampled[tokens].astype(int).tolist() for group in groups for tokens in group.records]
    trainer._generate = lambda _: (prompts, completions, tool_mask, texts, logprobs, {}, None, None)
    trainer._calculate_rewards = lambda *_: rewards
    return trainer._generate_and_score_completions([{"prompt": ""} for _ in completions])


def set_weights(trainer: GRPOTrainer) -> None:
    """The LoRA weights that every comparison starts from."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lora_parameters(trainer):
            values = LORA_STD * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(values)


def perturb(trainer: GRPOTrainer, seed: int, std: float = 0.02) -> None:
    """Moves the LoRA weights a little, as an optimizer step would; equal seeds move them equally."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora_parameters(trainer):
            parameter += std * torch.randn(parameter.shape, generator=generator)


def lora_parameters(trainer: GRPOTrainer) -> list[torch.nn.Parameter]:
    return [parameter for _, parameter in sorted(trainer.model.named_parameters()) if parameter.requires_grad]


def loss_and_gradients(trainer: GRPOTrainer, batch: Any) -> tuple[float, torch.Tensor]:
    """The loss of a step, a list of micro-batches in ours, and its gradient as one vector."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    if isinstance(trainer, SlipstreamTrainer):
        trainer.last = TrainedStep(MicroBatchPlan(0, 0, None), loss.item(), trainer.end_passes())
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in lora_parameters(trainer)])


def metrics_of(trainer: SlipstreamTrainer) -> dict[str, float]:
    """The metrics of the last step."""
    assert trainer.last is not None
    return trainer.last.metrics


def loss_options(**changes: Any) -> SimpleNamespace:
    """TRL's defaults for a step of two completions, with changes."""
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    return SimpleNamespace(**defaults | {"per_device_train_batch_size": 2, "max_completion_length": 6} | changes)


def loss_of_logprobs(
    options: Any, correction: Correction, logprobs: torch.Tensor, inputs: MicroBatch
) -> tuple[float, torch.Tensor]:
    """The loss when the current policy gives these log-probs (no model runs), and its gradient with respect to them.

    Args:
        options: with the names of `trl.GRPOConfig`.
    """
    leaf = logprobs.clone().requires_grad_()
    factors = importance_factors(
        correction,
        current=leaf,
        proximal=inputs.get("old_per_token_logps", leaf),
        behaviour=inputs["sampling_per_token_logps"],
        advantages=inputs["advantages"],
        mask=inputs["completion_mask"],
    )
    loss, _ = part_of_loss(options, inputs, Pass(leaf, torch.ones_like(leaf)), factors)
    loss.backward()
    return loss.item(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def trl_loss_of_logprobs(
    trainer: GRPOTrainer, logprobs: torch.Tensor, inputs: MicroBatch
) -> tuple[float, torch.Tensor]:
    """TRL's, of the same."""
    leaf = logprobs.clone().requires_grad_()
    with patch.object(
        trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (leaf, torch.ones_like(leaf), None)
    ):
        loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def inputs_of_logprobs(
    behaviour: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None = None, **more: torch.Tensor
) -> MicroBatch:
    """A micro-batch for `loss_of_logprobs`; the tokens themselves do not matter there."""
    ids = torch.full(behaviour.shape, 3)
    mask = torch.ones_like(ids) if mask is None else mask
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "sampling_per_token_logps": behaviour,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
        **more,
    }


def _ready(trainer: GRPOTrainer) -> GRPOTrainer:
    if torch.get_default_dtype() == torch.float64:  # the fixture `float64`
        trainer.model.double()
        if isinstance(trainer, SlipstreamTrainer):
            reference = trainer._reference
            reference._pairs = [(parameter, tensor.double()) for parameter, tensor in reference._pairs]
    set_weights(trainer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _named(name: str):
    def reward(**_):
        raise AssertionError("rewards come with the groups")

    reward.__name__ = name
    return reward
