"""What the importance ratios of a batch say about how far off-policy it is, and what the correction does about it.

Guarantee: finite numbers, and none of a micro-batch in which no token is in the loss; they come from the device in one transfer;
quantiles look at no more than `QUANTILE_SAMPLE` values. docs/algorithms.md says what each number means.
"""

import torch

from consumer.loss.importance import Correction, Factors

QUANTILE_SAMPLE = 2**16
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def ratio_statistics(correction: Correction, factors: Factors) -> dict[str, float]:
    """Statistics of p / b, by name.

    Without prefix: the raw ratios of the scored tokens, whatever the preset, so that they compare across runs.
    `sequence/` or `geometric/`: the raw ratios of the completions, where the preset has that level. `corrected/`: the
    factors of the tokens in the loss, after bounds and masks, where the correction does anything.
    """
    if not factors.in_loss.any():
        return {}
    log_ratio = factors.log_ratio[factors.scored].double()
    log_ratio = log_ratio if log_ratio.numel() else log_ratio.new_zeros(1)  # unscored tokens have ratio 1
    ratio = log_ratio.exp()
    result = _distribution(ratio) | {
        "kl": -log_ratio.mean(),  # k1 and k3 of KL(b || p), http://joschu.net/blog/kl-approx.html
        "kl_k3": (ratio - 1 - log_ratio).mean(),
        "unscored_share": _share(~factors.scored, factors.in_loss),
        "clipped_share": _share(factors.outside, factors.in_loss),
    }
    if correction.level in ("sequence", "geometric"):
        completions = factors.ratio[factors.in_loss.any(dim=1)].double().flatten()
        result |= {f"{correction.level}/{name}": value for name, value in _distribution(completions).items()}
    if correction.token_veto is not None:
        result["vetoed_share"] = _share(factors.vetoed, factors.in_loss.any(dim=1))
    if correction.probability_difference_max is not None:
        result["moved_share"] = _share(factors.moved, factors.in_loss)
    if correction.is_active:
        corrected = factors.policy[factors.in_loss].double()
        result |= {f"corrected/{name}": value for name, value in _distribution(corrected).items()}
        result["corrected/masked_share"] = _share(factors.policy == 0, factors.in_loss)
    return dict(zip(result, torch.stack(list(result.values())).tolist(), strict=True))


def effective_sample_share(ratio: torch.Tensor) -> torch.Tensor:
    """Kish's effective sample size over the sample size: (Σ r)² / (N Σ r²), in [0, 1]. 0 when all are masked."""
    return ratio.sum().square() / (ratio.numel() * ratio.square().sum()).clamp(min=torch.finfo(ratio.dtype).tiny)


def chi_square(ratio: torch.Tensor) -> torch.Tensor:
    """χ²(p ‖ b) estimated by mean (r - 1)², which is E r² - 1 in expectation but never negative."""
    return (ratio - 1).square().mean()


def _distribution(ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    sample = ratio[:: -(-ratio.numel() // QUANTILE_SAMPLE)]
    at = torch.tensor(list(_QUANTILES.values()), dtype=ratio.dtype, device=ratio.device)
    return {
        "mean": ratio.mean(),
        "min": ratio.min(),
        "max": ratio.max(),
        "effective_sample_share": effective_sample_share(ratio),
        "chi_square": chi_square(ratio),
    } | dict(zip(_QUANTILES, sample.quantile(at), strict=True))


def _share(these: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    return (these & among).sum().double() / among.sum()
