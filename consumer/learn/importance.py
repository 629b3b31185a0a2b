"""Importance correction: from the policy that sampled to the policy that trains. Pure functions of tensors.

Guarantee: a masked token has factor 0 and nothing brings it back; a token inside the bounds keeps its ratio unchanged;
no token without a sampling log-prob (NaN), no padding and no overflow reaches the result; no gradient flows through it.

Symbols: b behaviour policy (vLLM, some versions old), p proximal policy (the trainer's when the batch is cut), π current
policy; log-probs are of the sampled tokens under the temperature that was sampled with. Tensors are (B, T), with a mask
of the same shape that is 1 for tokens in the loss. docs/corrections.md compares the presets.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch

from protocol.config.learning import CorrectionSection

LOG_LIMIT = 80.0
"""Log-ratios, of tokens and of whole completions, are kept within ± this, so that the ratios are finite in float32."""


@dataclass(frozen=True)
class Correction:
    """The level of the ratio p / b, the action outside its bounds, and the masks on top."""

    level: Literal["none", "token", "sequence", "geometric"]
    action: Literal["truncate", "mask"]
    ratio_min: float
    ratio_max: float
    token_veto: float | None = None
    probability_difference_max: float | None = None

    @property
    def is_active(self) -> bool:
        """Return whether any factor can differ from 1."""
        return self.level != "none" or self.token_veto is not None or self.probability_difference_max is not None


PRESETS = {
    "none": Correction("none", "truncate", 0.0, math.inf),
    "token_truncate": Correction("token", "truncate", 0.0, 3.0),  # TIS: Ionides 2008; Yao et al. 2025
    "token_mask": Correction("token", "mask", 0.5, 2.0),  # token MIS: Liu, Li et al. 2025
    "sequence_truncate": Correction("sequence", "truncate", 0.0, 3.0),  # Seq-TIS: Liu, Li et al. 2025
    "sequence_mask": Correction("sequence", "mask", 0.0, 3.0),  # Seq-MIS: Liu, Li et al. 2025
    "geometric_truncate": Correction("geometric", "truncate", 0.5, 2.0),  # the ratio of GSPO, arXiv:2507.18071
    "geometric_mask": Correction("geometric", "mask", 0.9, 1.1),  # Geo-Mask: Li, Liu 2025; arXiv:2512.23075
    "icepop": Correction("token", "mask", 0.5, 5.0),  # arXiv:2510.18855
}
"""The values of `correction.preset`, with default bounds."""


def resolve(section: CorrectionSection) -> Correction:
    """Return the preset with the bounds and masks that the configuration sets."""
    preset = PRESETS[section.preset]
    return dataclasses.replace(
        preset,
        ratio_min=preset.ratio_min if section.ratio_min is None else section.ratio_min,
        ratio_max=preset.ratio_max if section.ratio_max is None else section.ratio_max,
        token_veto=section.token_veto,
        probability_difference_max=section.probability_difference_max,
    )


@dataclass(frozen=True)
class Factors:
    """The result of a correction, all detached."""

    policy: torch.Tensor
    """float (B, T): multiplies the policy loss. 1 where the mask is 0."""
    kl: torch.Tensor
    """float (B, T): multiplies the bias-corrected KL; the ratio, truncated whatever the action. 1 where the mask is 0."""
    in_loss: torch.Tensor
    """bool (B, T): the mask."""
    scored: torch.Tensor
    """bool (B, T): tokens in the loss that the sampler gave a log-prob for."""
    log_ratio: torch.Tensor
    """float (B, T): log p - log b; 0 where not scored."""
    ratio: torch.Tensor
    """float (B, T), or (B, 1) above token level: the ratio before truncation or masking."""
    outside: torch.Tensor
    """bool (B, T): tokens in the loss whose ratio is out of bounds."""
    vetoed: torch.Tensor
    """bool (B,): completions masked by one of their tokens."""
    moved: torch.Tensor
    """bool (B, T): tokens masked because their probability has moved too far."""


def importance_factors(
    correction: Correction,
    *,
    current: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> Factors:
    """Return the factor of every token: its level's ratio, truncated or masked, and 0 by a veto or a trust region.

    Args:
        current: float (B, T), log π. Equal to `proximal` in the first update over a batch.
        proximal: float (B, T), log p.
        behaviour: float (B, T), log b; NaN where the sampler gave none.
        advantages: float (B,), or (B, T).
        mask: (B, T), 1 for tokens in the loss.
    """
    current, proximal, in_loss = current.detach(), proximal.detach(), mask.bool()
    scored = in_loss & ~(proximal - behaviour).isnan()
    log_ratio = torch.where(scored, proximal - behaviour, 0.0).clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = level_ratio(log_ratio, scored, correction.level)
    truncated = ratio.clamp(correction.ratio_min, correction.ratio_max)
    outside = (ratio != truncated) & in_loss
    vetoed = veto(log_ratio, correction.token_veto)
    moved = moved_away(current, behaviour, advantages, correction.probability_difference_max) & in_loss
    masked = vetoed[:, None] | moved
    if correction.action == "mask":
        masked = masked | outside
    return Factors(
        policy=torch.where(in_loss, truncated.masked_fill(masked, 0.0), 1.0),
        kl=torch.where(in_loss, truncated, 1.0),
        in_loss=in_loss,
        scored=scored,
        log_ratio=log_ratio,
        ratio=ratio,
        outside=outside,
        vetoed=vetoed,
        moved=moved,
    )


def level_ratio(log_ratio: torch.Tensor, scored: torch.Tensor, level: str) -> torch.Tensor:
    """Return r of a token, or of its whole completion of T scored tokens: their product, or the geometric mean of them.

        token      r_t = p_t / b_t
        sequence   r   = Π_t r_t
        geometric  r   = (Π_t r_t)^(1/T)
        none       r   = 1

    A token without a sampling log-prob has ratio 1, adds nothing to the product and is left out of the mean.

    Args:
        log_ratio: float (B, T), 0 where not scored.
        scored: bool (B, T).

    Returns:
        float (B, T) at token level, else (B, 1).
    """
    if level == "token":
        return log_ratio.exp()
    total = log_ratio.sum(dim=1, keepdim=True)
    if level == "none":
        total = torch.zeros_like(total)
    if level == "geometric":
        total = total / scored.sum(dim=1, keepdim=True).clamp(min=1)
    return total.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def veto(log_ratio: torch.Tensor, token_veto: float | None) -> torch.Tensor:
    """Return bool (B,): completions with a token of ratio p / b below `token_veto` (Liu, Li et al. 2025).

    A token that the trainer thinks all but impossible shows that the completion was not sampled from this policy. The tokens
    behind it cannot be trusted either.
    """
    if token_veto is None:
        return torch.zeros(len(log_ratio), dtype=torch.bool, device=log_ratio.device)
    return (log_ratio < math.log(token_veto)).any(dim=1)


def moved_away(
    current: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, bound: float | None
) -> torch.Tensor:
    """Return bool (B, T): tokens outside DPPO's trust region, binary total variation (arXiv:2602.04879).

        |π_t - b_t| > bound  and  sign(π_t - b_t) = sign(A)

    The region is around the sampler, not around p, and the policy in it is the current one: another update would move
    the token further away. One that moves back is never masked, nor is one without a sampling log-prob.
    """
    if bound is None:
        return torch.zeros_like(current, dtype=torch.bool)
    difference = current.exp() - behaviour.exp()
    return (difference.abs() > bound) & (difference.sign() == advantages.view(len(current), -1).sign())
