"""What several parts of a step gave is what one part with all of their values gives."""

import math
from collections.abc import Mapping

import pytest
import torch

from consumer.learn import statistics as summary
from consumer.learn.statistics import Numbers, Summary, merged, over_ranks, quantiles, sampled
from consumer.ranks.exchange import ALONE
from tests.unit.consumer.ranks.thread_ranks import ThreadRanks, on_ranks

VALUES = {
    "tokens": torch.tensor([3.0, math.nan, -1.0, 8.0, 0.5, 2.0], dtype=torch.float64),
    "flags": torch.tensor([True, False, True, True, False, False]),
    "rows": torch.tensor([2.0, 7.0]),
    "unknown": torch.full((6,), math.nan),
}
EXPECTED = {
    "tokens": Numbers(5, 12.5, -1.0, 8.0),
    "flags": Numbers(6, 3, 0, 1),
    "rows": Numbers(2, 9.0, 2.0, 7.0),
    "unknown": Numbers(0, 0, math.inf, -math.inf),
}


def part(tokens: slice, rows: slice) -> Summary:
    values = {name: each[rows if name == "rows" else tokens] for name, each in VALUES.items()}
    return Summary.of(values, {"tokens": values["tokens"]})


PARTS = [(slice(0, 2), slice(0, 1)), (slice(2, 2), slice(0, 0)), (slice(2, 6), slice(1, 2))]


def test_one_part() -> None:
    numbers, samples = over_ranks(part(slice(None), slice(None)), ALONE)
    assert numbers == EXPECTED
    assert math.isnan(numbers["unknown"].mean)
    torch.testing.assert_close(samples["tokens"], VALUES["tokens"], equal_nan=True)


def test_micro_batches_one_of_them_empty() -> None:
    numbers, samples = over_ranks(merged([part(*each) for each in PARTS]), ALONE)
    assert numbers == EXPECTED
    torch.testing.assert_close(samples["tokens"], VALUES["tokens"], equal_nan=True)


def test_ranks_one_of_them_without_a_value() -> None:
    def work(ranks: ThreadRanks) -> object:
        numbers, samples = over_ranks(part(*PARTS[ranks.rank]), ranks)
        return numbers, samples["tokens"].nan_to_num(nan=9.0).tolist()

    expected = (EXPECTED, VALUES["tokens"].nan_to_num(nan=9.0).tolist())
    assert on_ranks(3, work) == [expected] * 3


def test_a_rank_says_no_more_for_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "SAMPLE", 100)
    sent = []

    class Counting(ThreadRanks):
        def gather(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            sent.append(sum(map(len, values.values())))
            return super().gather(values)

    def work(ranks: ThreadRanks) -> float:
        ranks.__class__ = Counting
        values = {
            "ratio": torch.linspace(0, 1, 10_000, dtype=torch.float64)
            if ranks.rank
            else torch.linspace(1, 2, 30_000, dtype=torch.float64)
        }
        numbers, samples = over_ranks(Summary.of(values, sampled(values, ["ratio"], 40_000)), ranks)
        assert numbers["ratio"] == Numbers(40_000, pytest.approx(50_000), 0.0, 2.0)
        return quantiles(samples["ratio"], {"median": 0.5})["median"]

    assert on_ranks(2, work) == [pytest.approx(4 / 3, abs=0.02)] * 2
    assert sorted(sent) == [25 + 4, 75 + 4]


def test_quantiles_of_what_is_known() -> None:
    assert quantiles(torch.tensor([math.nan, 1.0, 3.0]), {"low": 0.0, "mid": 0.5}) == {"low": 1.0, "mid": 2.0}
    assert math.isnan(quantiles(torch.tensor([math.nan]), {"mid": 0.5})["mid"])
