"""Steps of the real trainer on the stand-in GPU."""

from pathlib import Path

import pytest

from protocol.config.sections.learning import FIRST_TOKENS
from tests.gpu.trainers import trainer

pytestmark = pytest.mark.stand_in


def test_a_step_that_is_large_enough_to_be_measured(tmp_path: Path, llama: Path) -> None:
    """From the memory that a pass of 9,608 tokens takes, the trainer learns how many tokens the next may have."""
    trained = trainer(tmp_path, llama, completions=[[token] * 1200 for token in (3, 4, 5, 6)], sampled=2)
    trained.train()
    assert trained.last_cut is not None
    assert trained.last_cut.tokens == FIRST_TOKENS
    assert trained._cuts.tokens > FIRST_TOKENS
