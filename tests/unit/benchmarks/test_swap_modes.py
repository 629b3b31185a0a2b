"""Gaps between tokens go to the swaps that they overlap."""

from pathlib import Path

import pytest

from benchmarks import swap
from benchmarks.swap_modes import report, run_config


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


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_engines_of_one_device(device: str, dtype: str, tmp_path: Path) -> None:
    """vLLM takes 0.9 of a GPU where nothing else is said, and its LoRA kernels take 16 bits only there."""
    for config in (run_config(tmp_path, "adapter", device), swap._config(tmp_path, tmp_path, 8, "adapter", device)):
        assert config.model.dtype == dtype
        assert 3 * config.engine.get("gpu_memory_utilization", 0.9) < 1 or device == "cpu"
