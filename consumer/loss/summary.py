"""Counts, sums, extremes and samples of the values of a step, micro-batch by micro-batch and then rank by rank.

Guarantee: counts, sums and extremes are exact, however a step is cut and shared; a sample has all values of a step, or about
`SAMPLE` of them. A value that is NaN is left out. Nothing here waits for a device but `over_ranks`, which does so once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from consumer.ranks.exchange import Ranks

SAMPLE = 2**16

Values = dict[str, torch.Tensor]
"""By name, (N,) each: a value of each token in the loss, or of each row."""


class Numbers(NamedTuple):
    """Of the values of one name."""

    num_values: float
    total: float
    least: float  # infinity for no values
    greatest: float  # minus infinity for no values

    @property
    def mean(self) -> float:
        """NaN for no values."""
        return self.total / self.num_values if self.num_values else float("nan")


@dataclass(frozen=True)
class Summary:
    """Of values by name. Parts of one step have the same names in the same order.

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
    """Every k-th value of these names, with k = `num_tokens` / `SAMPLE`, rounded up.

    Args:
        num_tokens: in the loss of the whole step.
    """
    return {name: values[name][:: max(1, -(-num_tokens // SAMPLE))] for name in names}


def merged(parts: Sequence[Summary]) -> Summary:
    """As if the values of the parts were those of one."""
    [first, *others] = parts
    assert all(other.names == first.names for other in others)
    samples = {name: torch.cat([part.samples[name] for part in parts]) for name in first.samples}
    return Summary(first.names, _added(torch.stack([part.moments for part in parts])), samples)


def over_ranks(summary: Summary, ranks: Ranks) -> tuple[dict[str, Numbers], Values]:
    """The numbers and samples of all ranks, on the CPU. Is called by all of them."""
    flat = [summary.moments.flatten(), *(sample.double() for sample in summary.samples.values())]
    own = torch.cat(flat).cpu().split([len(part) for part in flat])
    names = ["moments", *(f"sample of {name}" for name in summary.samples)]
    found = ranks.gather(dict(zip(names, own, strict=True)))
    moments = _added(found["moments"].view(-1, *summary.moments.shape)).tolist()
    numbers = {name: Numbers(*row) for name, row in zip(summary.names, moments, strict=True)}
    return numbers, {name: found[f"sample of {name}"] for name in summary.samples}


def quantiles(sample: torch.Tensor, at: Mapping[str, float]) -> dict[str, float]:
    """Of the values that are not NaN, at most `SAMPLE` of them; of none, NaN."""
    known = sample[~sample.isnan()]
    known = known[:: max(1, -(-len(known) // SAMPLE))]
    if not len(known):
        return dict.fromkeys(at, float("nan"))
    found = known.quantile(torch.tensor(list(at.values()), dtype=known.dtype))
    return dict(zip(at, found.tolist(), strict=True))


def _moments(table: torch.Tensor) -> torch.Tensor:
    """(names, values) to (names, 4)."""
    unknown = table.isnan()
    count = (~unknown).sum(1).double()
    if not table.size(1):
        return torch.stack([count, count, count + torch.inf, count - torch.inf], 1)
    least, greatest = (table.masked_fill(unknown, fill) for fill in (torch.inf, -torch.inf))
    return torch.stack([count, table.masked_fill(unknown, 0.0).sum(1), least.amin(1), greatest.amax(1)], 1)


def _added(moments: torch.Tensor) -> torch.Tensor:
    """(parts, names, 4) to (names, 4)."""
    count, total, least, greatest = moments.unbind(2)
    return torch.stack([count.sum(0), total.sum(0), least.amin(0), greatest.amax(0)], 1)
