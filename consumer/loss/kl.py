"""The part of the bias-corrected KL term that TRL's loss leaves out. Pure functions of tensors.

Guarantee: added to TRL's loss, it makes the KL term that of the policy that trains, estimated from tokens of the policy
that sampled, in every one of TRL's loss types. It is exactly 0 where the importance ratio is 1.

TRL (`use_bias_correction_kl`, after DeepSeek-V3.2, arXiv:2512.02556) multiplies the k3 estimate of KL(π ‖ ref) by π / p.
The tokens came from b, so the ratio that makes it unbiased is π / b = π / p · p / b. A loss is linear in what it sums, so

    loss with (π / p · p / b) k3  =  TRL's loss with (π / p) k3  +  the same sum of  (p / b - 1) (π / p) k3
"""

import torch


def missing_kl(
    current: torch.Tensor,
    proximal: torch.Tensor,
    reference: torch.Tensor,
    ratio: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: str,
) -> torch.Tensor:
    """Per token, (p / b - 1) · π / p · k3, with k3 = ref / π - log(ref / π) - 1 (http://joschu.net/blog/kl-approx.html).

    Gradients flow through π, in π / p as in k3, which is what makes the gradient that of the reverse KL.

    Args:
        current: float (B, T), log π, with its graph.
        proximal: float (B, T), log p.
        reference: float (B, T), log ref.
        ratio: float (B, T), p / b as corrected, detached.
        mask: (B, T), 1 for tokens in the loss.
        level: TRL's `importance_sampling_level`, of π / p: `token`, or `sequence` for its geometric mean.

    Returns:
        float (B, T).
    """
    log_weight = current - proximal
    if level == "sequence":
        log_weight = (log_weight * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    log_reference = reference - current
    return (ratio - 1) * log_weight.exp() * (log_reference.exp() - log_reference - 1)


def aggregate(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    loss_type: str,
    *,
    num_items: torch.Tensor,
    max_completion_length: int,
) -> torch.Tensor:
    """The loss of a micro-batch, as TRL makes it of per-token losses.

    Args:
        per_token: float (B, T).
        mask: (B, T), 1 for tokens in the loss.
        loss_type: one of TRL's.
        num_items: int (), the tokens in the loss in all micro-batches of the step.

    Returns:
        float (), a mean or a normalized sum:

        grpo, sapo           mean over completions of the mean over tokens
        bnpo                 mean over the tokens of the micro-batch
        dr_grpo              sum / (B · max_completion_length)
        dapo, cispo, vespo   sum / tokens of the step
        luspo                mean over completions of the sum over tokens
    """
    masked = per_token * mask
    if loss_type in ("dapo", "cispo", "vespo"):
        return masked.sum() / num_items.clamp(min=1)
    if loss_type in ("grpo", "sapo"):
        return (masked.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    if loss_type == "bnpo":
        return masked.sum() / mask.sum().clamp(min=1)
    if loss_type == "dr_grpo":
        return masked.sum() / (len(masked) * max_completion_length)
    if loss_type == "luspo":
        return masked.sum(-1).mean()
    raise ValueError(f"no such loss type: {loss_type}")
