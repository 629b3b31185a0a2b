"""Numbers of micro-batches become those of their step."""

import math

import pytest
import torch

from consumer.loss.step_loss import EntropyCut, MicroBatchSize, metrics_of_step, share_of_step

PARTS = [MicroBatchSize(rows=1, tokens=30), MicroBatchSize(rows=3, tokens=10)]


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [("grpo", [1 / 8, 3 / 8]), ("dr_grpo", [1 / 8, 3 / 8]), ("bnpo", [30 / 50, 10 / 50]), ("dapo", [1.0, 1.0])],
)
def test_the_share_of_a_micro_batch(loss_type: str, expected: list[float]) -> None:
    """Of a step of up to 8 completions, with 50 tokens."""
    for part, value in zip(PARTS, expected, strict=True):
        assert share_of_step(loss_type, part, 8, 50) == pytest.approx(value)


def test_a_micro_batch_in_which_nothing_counts() -> None:
    assert share_of_step("bnpo", MicroBatchSize(1, 0), 8, 0) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_cut_is_at_an_entropy_and_not_at_its_rounding(dtype: torch.dtype) -> None:
    cut = EntropyCut.at(torch.tensor([0.3, 0.2, 0.1], dtype=dtype), 0.5)
    assert cut.num_tokens == 2


def test_metrics_by_hand() -> None:
    recorded = [
        {
            "kl": [1.0],
            "clip_ratio/low_min": [0.1],
            "clip_ratio/high_max": [0.2],
            "policy_loss": [1.0],
            "odd": [math.nan],
        },
        {"kl": [5.0], "clip_ratio/low_min": [0.0], "clip_ratio/high_max": [math.nan], "policy_loss": [5.0]},
    ]
    recorded[1]["entropy_coef"] = [0.5]
    assert metrics_of_step(recorded, PARTS, "dapo", "token") == {
        "kl": 2.0,  # 30 and 10 tokens
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_max": 0.2,
        "policy_loss": 6.0,
        "entropy_coef": 0.5,
    }


@pytest.mark.parametrize(
    ("name", "loss_type", "level", "expected"),
    [
        ("policy_loss", "grpo", "token", 4.0),  # 1 and 3 rows
        ("policy_loss", "bnpo", "token", 2.0),
        ("clip_ratio/region_mean", "grpo", "token", 2.0),
        ("clip_ratio/region_mean", "grpo", "sequence", 4.0),
        ("cispo_clip_ratio", "cispo", "sequence", 4.0),
        ("vespo/phi_seq_mean", "vespo", "token", 4.0),
        ("entropy", "vespo", "token", 2.0),
    ],
)
def test_a_mean_is_over_what_trls_is_over(name: str, loss_type: str, level: str, expected: float) -> None:
    assert metrics_of_step([{name: [1.0]}, {name: [5.0]}], PARTS, loss_type, level) == {name: expected}
