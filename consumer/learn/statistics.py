"""Numbers of a step: counts, sums, extremes and samples of its values, and the statistics of its importance ratios.

Guarantee: counts, sums and extremes are exact, however a step is split and shared; a sample has all values of a step, or about
`SAMPLE` of them. A value that is NaN is left out. Statistics are finite, and a step in which no token is in the loss has none.
Nothing here waits for a device but `over_ranks`, which does so once. docs/corrections.md explains each number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from consumer.learn.importance import Correction, Factors
from consumer.learn.micro_batches import Places
from consumer.ranks.exchange import Ranks
from replay.journal.schema import MicroBatchPlan

_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
SAMPLE = 2**16

Values = dict[str, torch.Tensor]
"""By name, (N,) each: a value of each token in the loss, or of each row."""


@dataclass
class TrainedStep:
    """An optimizer step as the trainer knows it when it ends.

    Args:
        plan: how it was split into passes, as the journal records it.
        loss: of the whole step.
        metrics: by TRL's names, NaN where a step has no such number; on rank 0 those of all ranks.
        grad_norm: before clipping.
    """

    plan: MicroBatchPlan
    loss: float
    metrics: dict[str, float]
    grad_norm: float = math.nan


class Numbers(NamedTuple):
    """Count, sum and extremes of the values of one name."""

    num_values: float
    total: float
    least: float  # infinity for no values
    greatest: float  # minus infinity for no values

    @property
    def mean(self) -> float:
        """The mean of the values; NaN for no values."""
        return self.total / self.num_values if self.num_values else float("nan")


@dataclass(frozen=True)
class Summary:
    """Numbers and samples of values by name. Parts of one step have the same names in the same order.

    Args:
        moments: float64 (names, 4), each row the fields of `Numbers`.
        samples: of some names.
    """

    names: tuple[str, ...]
    moments: torch.Tensor
    samples: Values

    @classmethod
    def of(cls, values: Values, samples: Values | None = None) -> "Summary":
        tables = [
            torch.stack([values[name].double() for name in names])
            for _, names in groupby(values, key=lambda name: len(values[name]))
        ]
        return cls(tuple(values), torch.cat([_moments(table) for table in tables]), samples or {})


def sampled(values: Values, names: Sequence[str], num_tokens: int) -> Values:
    """Take every k-th value of these names, with k = `num_tokens` / `SAMPLE`, rounded up.

    Args:
        num_tokens: in the loss of the whole step.
    """
    return {name: values[name][:: max(1, -(-num_tokens // SAMPLE))] for name in names}


def merged(parts: Sequence[Summary]) -> Summary:
    """Return the summary of all parts together."""
    [first, *others] = parts
    assert all(other.names == first.names for other in others)
    samples = {name: torch.cat([part.samples[name] for part in parts]) for name in first.samples}
    return Summary(first.names, _added(torch.stack([part.moments for part in parts])), samples)


def over_ranks(summary: Summary, ranks: Ranks) -> tuple[dict[str, Numbers], Values]:
    """Return the numbers and samples of all ranks, on the CPU. All ranks call it."""
    flat = [summary.moments.flatten(), *(sample.double() for sample in summary.samples.values())]
    own = torch.cat(flat).cpu().split([len(part) for part in flat])
    names = ["moments", *(f"sample of {name}" for name in summary.samples)]
    found = ranks.gather(dict(zip(names, own, strict=True)))
    moments = _added(found["moments"].view(-1, *summary.moments.shape)).tolist()
    numbers = {name: Numbers(*row) for name, row in zip(summary.names, moments, strict=True)}
    return numbers, {name: found[f"sample of {name}"] for name in summary.samples}


def quantiles(sample: torch.Tensor, at: Mapping[str, float]) -> dict[str, float]:
    """Return the quantiles of the values that are not NaN, of at most `SAMPLE` of them; NaN of no values."""
    known = sample[~sample.isnan()]
    known = known[:: max(1, -(-len(known) // SAMPLE))]
    if not len(known):
        return dict.fromkeys(at, float("nan"))
    found = known.quantile(torch.tensor(list(at.values()), dtype=known.dtype))
    return dict(zip(at, found.tolist(), strict=True))


def _moments(table: torch.Tensor) -> torch.Tensor:
    """Turn (names, values) into (names, 4)."""
    unknown = table.isnan()
    count = (~unknown).sum(1).double()
    if not table.size(1):
        return torch.stack([count, count, count + torch.inf, count - torch.inf], 1)
    least, greatest = (table.masked_fill(unknown, fill) for fill in (torch.inf, -torch.inf))
    return torch.stack([count, table.masked_fill(unknown, 0.0).sum(1), least.amin(1), greatest.amax(1)], 1)


def _added(moments: torch.Tensor) -> torch.Tensor:
    """Turn (parts, names, 4) into (names, 4)."""
    count, total, least, greatest = moments.unbind(2)
    return torch.stack([count.sum(0), total.sum(0), least.amin(0), greatest.amax(0)], 1)


def ratio_values(correction: Correction, factors: Factors, places: Places) -> Values:
    """Return the values behind the statistics: one of each token in the loss, then one of each completion with such a token."""

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
    """Return the names of values whose quantiles are reported: those of tokens, and those of completions."""
    of_tokens = ["ratio", "policy"] if correction.is_active else ["ratio"]
    return of_tokens, ["completions"] if correction.level in ("sequence", "geometric") else []


def ratio_statistics(correction: Correction, numbers: Mapping[str, Numbers], samples: Values) -> dict[str, float]:
    """Return statistics of p / b, by name.

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
    """Return a distribution by its numbers. Kish's effective sample size over the sample size is (Σ r)² / (N Σ r²), in [0, 1],
    0 when all are masked. χ²(p ‖ b) is estimated by mean (r - 1)², which is E r² - 1 in expectation but never negative."""
    ratio, squares = numbers[name], numbers[f"{name} squared"].total
    return {
        "mean": ratio.mean,
        "min": ratio.least,
        "max": ratio.greatest,
        "effective_sample_share": ratio.total**2 / (ratio.num_values * squares) if squares else 0.0,
        "chi_square": numbers[f"{name} from 1, squared"].mean,
    } | quantiles(samples[name], _QUANTILES)
