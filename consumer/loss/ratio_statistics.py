"""What the importance ratios of a batch say about how far off-policy it is, and what the correction does about it.

Guarantee: finite numbers, and none of a micro-batch in which no token is in the loss; they come from the device in one transfer;
quantiles look at no more than `QUANTILE_SAMPLE` values. docs/algorithms.md says what each number means.
"""

from collections.abc import Mapping

import torch

from consumer.loss.importance import Correction, Factors

QUANTILE_SAMPLE = 2**16
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def ratio_values(factors: Factors) -> dict[str, torch.Tensor]:
    """What the statistics are made of, each (N,): a value of each token in the loss, or of each completion that has one."""
    in_loss = factors.in_loss
    rows = in_loss.any(dim=1)
    of_tokens = {
        "scored": factors.scored,
        "log_ratio": factors.log_ratio,
        "outside": factors.outside,
        "moved": factors.moved,
        "policy": factors.policy,
    }
    return {name: values[in_loss] for name, values in of_tokens.items()} | {
        "vetoed": factors.vetoed[rows],
        "completions": factors.ratio[rows, 0],  # above token level all of its tokens have the same
    }


def ratio_statistics(correction: Correction, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Statistics of p / b, by name.

    Without prefix: the raw ratios of the scored tokens, whatever the preset, so that they compare across runs.
    `sequence/` or `geometric/`: the raw ratios of the completions, where the preset has that level. `corrected/`: the
    factors of the tokens in the loss, after bounds and masks, where the correction does anything.

    Args:
        values: of the whole step, by the names of `ratio_values`; true and false may be 1 and 0.
    """
    if not len(values["scored"]):
        return {}
    scored = values["scored"].bool()
    log_ratio = values["log_ratio"][scored].double()
    log_ratio = log_ratio if log_ratio.numel() else log_ratio.new_zeros(1)  # unscored tokens have ratio 1
    ratio = log_ratio.exp()
    result = _distribution(ratio) | {
        "kl": -log_ratio.mean(),  # k1 and k3 of KL(b || p), http://joschu.net/blog/kl-approx.html
        "kl_k3": (ratio - 1 - log_ratio).mean(),
        "unscored_share": (~scored).double().mean(),
        "clipped_share": values["outside"].double().mean(),
    }
    if correction.level in ("sequence", "geometric"):
        of_completions = _distribution(values["completions"].double())
        result |= {f"{correction.level}/{name}": value for name, value in of_completions.items()}
    if correction.token_veto is not None:
        result["vetoed_share"] = values["vetoed"].double().mean()
    if correction.probability_difference_max is not None:
        result["moved_share"] = values["moved"].double().mean()
    if correction.is_active:
        corrected = values["policy"].double()
        result |= {f"corrected/{name}": value for name, value in _distribution(corrected).items()}
        result["corrected/masked_share"] = (corrected == 0).double().mean()
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
