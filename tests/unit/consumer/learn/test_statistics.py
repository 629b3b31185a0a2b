"""Numbers of a step against numbers worked by hand: parts together give those of the whole; statistics of importance ratios."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from consumer.learn import statistics as summary
from consumer.learn.importance import PRESETS, importance_factors
from consumer.learn.micro_batches import Places
from consumer.learn.statistics import (
    Numbers,
    Summary,
    merged,
    over_ranks,
    quantiles,
    ratio_statistics,
    ratio_values,
    sampled,
    samples_of,
)
from consumer.ranks.exchange import ALONE
from tests.unit.consumer.ranks.thread_ranks import ThreadRanks, on_ranks

NAN = math.nan
LOG2, LOG4 = math.log(2), math.log(4)


def statistics(
    preset: str, log_ratios: list[list[float]], mask: list[list[int]] | None = None, **changes: Any
) -> dict[str, float]:
    correction = dataclasses.replace(PRESETS[preset], **changes)
    p = torch.full((len(log_ratios), len(log_ratios[0])), -1.0)
    in_loss = torch.ones_like(p) if mask is None else torch.tensor(mask)
    factors = importance_factors(
        correction,
        current=p,
        proximal=p,
        behaviour=p - torch.tensor(log_ratios),
        advantages=torch.ones(len(p)),
        mask=in_loss,
    )
    values = ratio_values(correction, factors, Places.of(in_loss))
    of_tokens, of_rows = samples_of(correction)
    samples = sampled(values, of_tokens, int(in_loss.sum())) | {name: values[name] for name in of_rows}
    return ratio_statistics(correction, *over_ranks(Summary.of(values, samples), ALONE))


# Ratios 1, 2, 4 and 1/4; one token is not scored, one is padding.
LOG_RATIOS = [[0.0, LOG2, LOG4], [-LOG4, NAN, -3.0]]
MASK = [[1, 1, 1], [1, 1, 0]]
RAW = {
    "mean": 7.25 / 4,
    "min": 0.25,
    "max": 4.0,
    "effective_sample_share": 7.25**2 / (4 * (1 + 4 + 16 + 1 / 16)),
    "chi_square": (0 + 1 + 9 + 9 / 16) / 4,
    "kl": -LOG2 / 4,
    "kl_k3": (0 + (1 - LOG2) + (3 - LOG4) + (-0.75 + LOG4)) / 4,
    "p01": 0.25 + 0.03 * 0.75,
    "p50": 1.5,
    "p99": 2 + 0.97 * 2,
    "unscored_share": 1 / 5,
    "clipped_share": 1 / 5,
}


def test_before_and_after_a_truncation() -> None:
    corrected = {  # 1, 2, 3, 1/4 and 1
        "mean": 7.25 / 5,
        "min": 0.25,
        "max": 3.0,
        "effective_sample_share": 7.25**2 / (5 * (1 + 4 + 9 + 1 / 16 + 1)),
        "chi_square": (0 + 1 + 4 + 9 / 16 + 0) / 5,
        "p01": 0.25 + 0.04 * 0.75,
        "p50": 1.0,
        "p99": 2 + 0.96,
        "masked_share": 0.0,
    }
    expected = RAW | {f"corrected/{name}": value for name, value in corrected.items()}
    assert statistics("token_truncate", LOG_RATIOS, MASK) == pytest.approx(expected, rel=1e-6)


def test_without_a_correction_there_is_no_after() -> None:
    assert statistics("none", LOG_RATIOS, MASK) == pytest.approx(RAW | {"clipped_share": 0.0}, rel=1e-6)


def test_completions_have_ratios_of_their_own_above_token_level() -> None:
    result = statistics(
        "sequence_mask", LOG_RATIOS, MASK
    )  # 8 and 1/4: the first is out of bounds, with its three tokens
    assert {name: result[name] for name in RAW} == pytest.approx(RAW | {"clipped_share": 3 / 5}, rel=1e-6)
    assert result["sequence/max"] == pytest.approx(8)
    assert result["sequence/min"] == pytest.approx(0.25)
    assert result["sequence/p50"] == pytest.approx(8.25 / 2)
    assert result["corrected/masked_share"] == pytest.approx(3 / 5)
    assert result["corrected/mean"] == pytest.approx(0.5 / 5)
    assert result["corrected/effective_sample_share"] == pytest.approx(2 / 5), "two equal factors of five"
    result = statistics("geometric_truncate", LOG_RATIOS, MASK)
    assert (result["geometric/max"], result["geometric/min"]) == pytest.approx((2, 0.25))


def test_shares_of_the_masks_on_top() -> None:
    result = statistics("none", LOG_RATIOS, MASK, token_veto=0.3, probability_difference_max=0.2)
    assert result["vetoed_share"] == 1 / 2
    # exp(-1) = 0.37 against 0.18 and 0.09: moved up by 0.18 and 0.28
    assert result["moved_share"] == 1 / 5
    assert result["corrected/masked_share"] == pytest.approx(3 / 5)
    assert result["clipped_share"] == 0


def test_a_completion_that_does_not_count_is_not_among_the_vetoed() -> None:
    result = statistics("none", [[-LOG4], [-LOG4], [0.0]], [[1], [0], [1]], token_veto=0.3)
    assert result["vetoed_share"] == 1 / 2


@pytest.mark.parametrize("preset", PRESETS)
def test_a_micro_batch_in_which_nothing_counts_says_nothing(preset: str) -> None:
    """It would pull the mean over the micro-batches towards 1."""
    assert statistics(preset, [[0.5, NAN]], [[0, 0]], token_veto=0.5, probability_difference_max=0.5) == {}


def test_unscored_tokens_alone_are_on_policy() -> None:
    result = statistics("sequence_truncate", [[NAN, NAN]])
    assert result["unscored_share"] == 1
    assert (result["mean"], result["kl"], result["effective_sample_share"], result["sequence/p50"]) == (1, 0, 1, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_numbers_are_finite_whatever_the_ratios(preset: str) -> None:
    result = statistics(preset, [[300.0, -300.0, NAN, 300.0]] * 2, token_veto=1e-4)
    assert all(math.isfinite(value) for value in result.values())
    masked = statistics("token_mask", [[9.0, 9.0]])
    assert masked["corrected/effective_sample_share"] == 0


def test_quantiles_look_at_no_more_than_so_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "SAMPLE", 64)
    sizes = []
    quantile = torch.Tensor.quantile

    def counted(values: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sizes.append(values.numel())
        return quantile(values, *arguments)

    monkeypatch.setattr(torch.Tensor, "quantile", counted)
    log_ratios = torch.linspace(-1, 1, 1000).reshape(10, 100).tolist()
    result = statistics("token_truncate", log_ratios)
    assert max(sizes) <= 64
    assert result["p50"] == pytest.approx(1.0, abs=0.05)
    assert result["max"] == pytest.approx(math.e), "only the quantiles are of a sample"


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
