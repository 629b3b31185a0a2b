"""Importance correction: from the policy that sampled to the policy that trains. Pure functions of tensors.

Symbols: b behaviour policy (vLLM, some versions old), p proximal policy (the trainer's when the batch is cut); log-probs
are of the sampled tokens under the temperature that was sampled with. Shapes are (B, T) with a mask of the same shape.
"""

import torch


def truncated_ratio(
    proximal: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, ratio_max: float
) -> torch.Tensor:
    """Per-token truncated importance sampling: min(p / b, ratio_max) (Ionides 2008; for GRPO arXiv:2505.24298).

    Tokens that the sampler could not score (NaN) and masked positions have ratio 1. No gradient flows through it.

    Args:
        proximal: float (B, T), log-probs under the trainer.
        behaviour: float (B, T), log-probs under the sampler.
        mask: (B, T), 1 for tokens that count.

    Returns:
        float (B, T) in (0, ratio_max].
    """
    return _log_ratio(proximal, behaviour, mask).exp().clamp(max=ratio_max)


def ratio_statistics(
    proximal: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, ratio_max: float
) -> dict[str, float]:
    """What the ratios of a batch say about its off-policyness, before truncation except for `clipped_share`.

    `effective_sample_share` is Kish's (sum r)^2 / (N sum r^2) over the N tokens; `kl` estimates KL(b || p) per token by
    the k1 estimator, mean(log b - log p).
    """
    log_ratio = _log_ratio(proximal, behaviour, mask)[mask.bool()].double()
    if log_ratio.numel() == 0:
        return {"mean": 1.0, "min": 1.0, "max": 1.0, "clipped_share": 0.0, "effective_sample_share": 1.0, "kl": 0.0}
    ratio = log_ratio.exp()
    return {
        "mean": ratio.mean().item(),
        "min": ratio.min().item(),
        "max": ratio.max().item(),
        "clipped_share": (ratio > ratio_max).double().mean().item(),
        "effective_sample_share": (ratio.sum().square() / (ratio.numel() * ratio.square().sum())).item(),
        "kl": -log_ratio.mean().item(),
    }


def _log_ratio(proximal: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.bool(), proximal.detach() - behaviour, 0.0).nan_to_num(nan=0.0)
