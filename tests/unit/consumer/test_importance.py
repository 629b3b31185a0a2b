"""Importance ratios and their statistics against numbers worked by hand."""

import math

import pytest
import torch

from consumer.importance import ratio_statistics, truncated_ratio

NAN = math.nan
LOG2, LOG4 = math.log(2), math.log(4)


def test_the_ratio_is_cut_from_above_only() -> None:
    proximal = torch.tensor([[-1.0, -1.0, -1.0, -1.0 - LOG4]])
    behaviour = torch.tensor([[-1.0, -1.0 - LOG2, -1.0 - LOG4, -1.0]])
    ratio = truncated_ratio(proximal, behaviour, torch.ones(1, 4), 3.0)
    torch.testing.assert_close(ratio, torch.tensor([[1.0, 2.0, 3.0, 0.25]]))


def test_masked_and_unscored_tokens_have_ratio_one() -> None:
    proximal = torch.tensor([[-1.0, -1.0, -5.0]])
    behaviour = torch.tensor([[NAN, -1.0 - LOG2, -1.0]])
    ratio = truncated_ratio(proximal, behaviour, torch.tensor([[1, 0, 1]]), 10.0)
    torch.testing.assert_close(ratio, torch.tensor([[1.0, 1.0, math.exp(-4)]]))


def test_a_masked_nan_stays_out() -> None:
    ratio = truncated_ratio(torch.tensor([[NAN, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.tensor([[0, 1]]), 3.0)
    assert ratio.tolist() == [[1.0, 1.0]]


def test_no_gradient_flows_through_the_ratio() -> None:
    proximal = torch.tensor([[-1.0]], requires_grad=True)
    assert not truncated_ratio(proximal, torch.tensor([[-2.0]]), torch.ones(1, 1), 3.0).requires_grad


def test_a_huge_difference_is_cut_and_a_tiny_one_is_zero_not_nan() -> None:
    ratio = truncated_ratio(torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0, 0.0]]), torch.ones(1, 2), 3.0)
    assert ratio.tolist() == [[3.0, 0.0]]


def test_statistics_by_hand() -> None:
    # ratios 1, 2, 4 and 1/4, the fifth is padding
    proximal = torch.tensor([[-1.0, -1.0, -1.0], [-1.0 - LOG4, -9.0, -1.0]])
    behaviour = torch.tensor([[-1.0, -1.0 - LOG2, -1.0 - LOG4], [-1.0, -1.0, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert ratio_statistics(proximal, behaviour, mask, 3.0) == pytest.approx(
        {
            "mean": 7.25 / 4,
            "min": 0.25,
            "max": 4.0,
            "clipped_share": 0.25,
            "effective_sample_share": 7.25**2 / (4 * (1 + 4 + 16 + 1 / 16)),
            "kl": -(0 + LOG2 + LOG4 - LOG4) / 4,
        },
        rel=1e-6,
    )


def test_statistics_of_nothing() -> None:
    assert ratio_statistics(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2), 3.0) == {
        "mean": 1.0,
        "min": 1.0,
        "max": 1.0,
        "clipped_share": 0.0,
        "effective_sample_share": 1.0,
        "kl": 0.0,
    }


def test_an_unscored_token_counts_as_on_policy() -> None:
    statistics = ratio_statistics(torch.tensor([[-1.0, -1.0]]), torch.tensor([[NAN, -1.0]]), torch.ones(1, 2), 3.0)
    assert (statistics["mean"], statistics["kl"], statistics["effective_sample_share"]) == (1.0, 0.0, 1.0)
