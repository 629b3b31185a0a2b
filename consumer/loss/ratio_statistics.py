"""What the importance ratios of a batch say about how far off-policy it is, and what the correction does about it.

Guarantee: finite numbers, and none of a step in which no token is in the loss. docs/algorithms.md says what each number means.
"""

from collections.abc import Mapping

import torch

from consumer.batches.tensors import Places
from consumer.loss.importance import Correction, Factors
from consumer.loss.summary import Numbers, Values, quantiles

_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def ratio_values(correction: Correction, factors: Factors, places: Places) -> Values:
    """What the statistics are made of: a value of each token in the loss, then of each completion that has one."""

    def of_tokens(values: torch.Tensor) -> torch.Tensor:
        return values.flatten()[places.tokens]

    scored = of_tokens(factors.scored)
    log_ratio = of_tokens(factors.log_ratio).double().masked_fill(~scored, torch.nan)
    ratio = log_ratio.exp()
    values = {"log": log_ratio, "k3": ratio - 1 - log_ratio, "unscored": ~scored, "outside": of_tokens(factors.outside)}
    values |= _powers("ratio", ratio)
    if correction.is_active:
        policy = of_tokens(factors.policy).double()
        values |= _powers("policy", policy) | {"masked": policy == 0}
    if correction.probability_difference_max is not None:
        values["moved"] = of_tokens(factors.moved)
    if correction.level in ("sequence", "geometric"):  # all tokens of a completion have the same
        values |= _powers("completions", factors.ratio[places.rows, 0].double())
    if correction.token_veto is not None:
        values["vetoed"] = factors.vetoed[places.rows]
    return values


def samples_of(correction: Correction) -> tuple[list[str], list[str]]:
    """The names of values whose quantiles are reported: those of tokens, and those of completions."""
    of_tokens = ["ratio", "policy"] if correction.is_active else ["ratio"]
    return of_tokens, ["completions"] if correction.level in ("sequence", "geometric") else []


def ratio_statistics(correction: Correction, numbers: Mapping[str, Numbers], samples: Values) -> dict[str, float]:
    """Statistics of p / b, by name.

    Without prefix: the raw ratios of the scored tokens, whatever the preset, so that they compare across runs.
    `sequence/` or `geometric/`: the raw ratios of the completions, where the preset has that level. `corrected/`: the
    factors of the tokens in the loss, after bounds and masks, where the correction does anything.

    Args:
        numbers: of the whole step, by the names of `ratio_values`.
        samples: by the names of `samples_of`.
    """
    if not numbers["unscored"].num_values:
        return {}
    if numbers["ratio"].num_values:
        result = _distribution("ratio", numbers, samples)
        result |= {"kl": -numbers["log"].mean, "kl_k3": numbers["k3"].mean}  # http://joschu.net/blog/kl-approx.html
    else:  # unscored tokens have ratio 1
        result = dict.fromkeys(("mean", "min", "max", "effective_sample_share", *_QUANTILES), 1.0)
        result |= dict.fromkeys(("chi_square", "kl", "kl_k3"), 0.0)
    result |= {"unscored_share": numbers["unscored"].mean, "clipped_share": numbers["outside"].mean}
    if correction.level in ("sequence", "geometric"):
        of_completions = _distribution("completions", numbers, samples)
        result |= {f"{correction.level}/{name}": value for name, value in of_completions.items()}
    if correction.token_veto is not None:
        result["vetoed_share"] = numbers["vetoed"].mean
    if correction.probability_difference_max is not None:
        result["moved_share"] = numbers["moved"].mean
    if correction.is_active:
        result |= {f"corrected/{name}": value for name, value in _distribution("policy", numbers, samples).items()}
        result["corrected/masked_share"] = numbers["masked"].mean
    return result


def _powers(name: str, ratio: torch.Tensor) -> Values:
    return {name: ratio, f"{name} squared": ratio.square(), f"{name} from 1, squared": (ratio - 1).square()}


def _distribution(name: str, numbers: Mapping[str, Numbers], samples: Values) -> dict[str, float]:
    """Kish's effective sample size over the sample size is (Σ r)² / (N Σ r²), in [0, 1], 0 when all are masked. χ²(p ‖ b) is
    estimated by mean (r - 1)², which is E r² - 1 in expectation but never negative."""
    ratio, squares = numbers[name], numbers[f"{name} squared"].total
    return {
        "mean": ratio.mean,
        "min": ratio.least,
        "max": ratio.greatest,
        "effective_sample_share": ratio.total**2 / (ratio.num_values * squares) if squares else 0.0,
        "chi_square": numbers[f"{name} from 1, squared"].mean,
    } | quantiles(samples[name], _QUANTILES)
