"""Gaps between tokens go to the swaps that they overlap."""

import pytest

from benchmarks.swap_modes import report


def test_gaps_at_swaps_and_elsewhere() -> None:
    times = [0.0, 0.01, 0.02, 0.05, 0.06, 0.10, 0.11, 0.12]
    found = report(times, [(0.025, 0.02), (0.061, 0.01), (0.119, 0.02)])
    assert found == pytest.approx(
        {
            "swaps": 2,  # the third ends after the last token
            "swap_ms": 20,
            "step_ms": 10,
            "longest_gap_at_a_swap_ms": 35,
            "longest_gap_of_all_swaps_ms": 40,
            "longest_gap_elsewhere_ms": 10,
        }
    )
