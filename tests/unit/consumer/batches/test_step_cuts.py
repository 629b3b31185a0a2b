"""How many tokens a pass may have: what was recorded, what all ranks agree on, what is left when the device refuses."""

from typing import Any

import pytest
import torch

from consumer.batches.step_cuts import StepCutter, carry_over
from consumer.ranks.exchange import ALONE
from protocol.config.learning import FIRST_TOKENS
from protocol.errors import DeviceError
from replay.batches.cutting import CutBatch
from replay.groups import RolloutGroup
from replay.journal.tables import StepCut
from tests.unit.consumer.batches.test_batches import RECIPE
from tests.unit.consumer.builders import rollout_group
from tests.unit.consumer.ranks.thread_ranks import ThreadRanks, on_ranks

GROUP = rollout_group([[1, 2, 3, 4], [5, 6]], prompt=[7, 8], rewards=[0.0, 1.0])  # rows of 6 and 4 tokens


def none_recorded(step: int) -> StepCut | None:
    return None


def batch_of(groups: list[RolloutGroup], *, first: int = 1, num_iterations: int = 1) -> CutBatch:
    return CutBatch(first - 1, num_iterations, first + num_iterations - 1, groups, len(groups))


def begun(cutter: StepCutter, step: int = 1) -> int:
    """Begins a step; returns its number of passes."""
    return len(next(cutter.steps(RECIPE, batch_of([GROUP], first=step))))


def test_a_run_goes_on_with_what_it_had_come_to_and_cuts_recorded_steps_as_they_were() -> None:
    rows = [StepCut(3, 12, None), StepCut(5, 6, b"state")]

    def recorded(step: int) -> StepCut | None:
        return max((row for row in rows if row.step <= step), default=None, key=lambda row: row.step)

    cutter = StepCutter("auto", ALONE, recorded)
    found = [(begun(cutter, step), cutter.tokens, cutter.random_state) for step in (4, 5, 6)]
    assert found == [(1, 12, None), (2, 6, b"state"), (2, 6, None)]
    rows.append(StepCut(7, 12, None))
    assert (begun(cutter, 7), cutter.tokens) == (1, 12)
    cutter.measured(9)
    assert cutter.tokens == 12, "a run that has come to something else measures no more"


def test_a_run_begins_with_the_default_and_measures_once() -> None:
    cutter = StepCutter("auto", ALONE, none_recorded)
    assert (begun(cutter), cutter.tokens) == (1, FIRST_TOKENS)
    cutter.measured(None)
    assert cutter.tokens == FIRST_TOKENS
    cutter.measured(6)
    assert (begun(cutter, 2), cutter.tokens) == (2, 6)


def test_a_fixed_number_is_neither_recorded_nor_measured_nor_halved() -> None:
    cutter = StepCutter(12, ALONE, lambda step: StepCut(step, 6, b"state"))
    assert (begun(cutter), cutter.tokens, cutter.random_state) == (1, 12, None)
    cutter.measured(6)
    assert cutter.tokens == 12
    with pytest.raises(DeviceError) as caught:
        cutter.halve("no 2 GiB")
    assert str(caught.value) == (
        "the trainer's device has no memory for a pass of 12 tokens (no 2 GiB); lower pipeline.trainer_tokens_per_micro_batch or "
        "leave it to auto, then go on with --resume"
    )


def test_halving_goes_on_until_there_are_more_passes_and_ends_with_single_rows() -> None:
    cutter = StepCutter("auto", ALONE, none_recorded)
    assert begun(cutter) == 1
    assert [batch["row"].tolist() for batch in cutter.halve("")] == [[0], [1]]
    assert cutter.tokens == 8, "the two rows take 12 with padding: the first number of halvings that parts them"
    with pytest.raises(DeviceError, match=r"no memory for a single completion with its prompt \(none left\)"):
        cutter.halve("none left")


def test_what_fixed_policies_said_of_a_row_stays_with_it() -> None:
    cutter = StepCutter("auto", ALONE, none_recorded)
    steps = cutter.steps(RECIPE, batch_of([GROUP], num_iterations=2))
    [whole] = next(steps)
    whole["ref_per_token_logps"] = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, 0.0, 0.0]])
    [again] = next(steps)
    assert again is whole
    long, short = cutter.halve("")
    assert long["ref_per_token_logps"].tolist() == [[-1.0, -2.0, -3.0, -4.0]]
    assert short["ref_per_token_logps"].tolist() == [[-5.0, -6.0]]
    back = RECIPE.tensors([GROUP])
    carry_over([long, short], back)
    assert torch.equal(back[0]["ref_per_token_logps"], whole["ref_per_token_logps"])


def test_a_first_step_over_a_batch_keeps_nothing_when_it_is_cut_again() -> None:
    """Run again, it is cut like this at once, and computes them in these passes."""
    cutter = StepCutter("auto", ALONE, none_recorded)
    [whole] = next(cutter.steps(RECIPE, batch_of([GROUP])))
    whole["ref_per_token_logps"] = torch.zeros(2, 4)
    assert not any("ref_per_token_logps" in batch for batch in cutter.halve(""))


def test_all_ranks_cut_alike() -> None:
    def work(ranks: ThreadRanks) -> Any:
        recorded = StepCut(1, 12, b"state") if ranks.rank == 0 else StepCut(1, 3, b"other")
        cutter = StepCutter("auto", ranks, lambda step: recorded)
        cutter.tokens = FIRST_TOKENS
        steps = cutter.steps(RECIPE, batch_of([GROUP], num_iterations=2))
        next(steps)
        found = [(cutter.tokens, cutter.random_state)]
        cutter.tokens = FIRST_TOKENS
        cutter.measured(9 if ranks.rank else None)
        return [*found, cutter.tokens]

    assert on_ranks(2, work) == [[(12, b"state"), 9], [(12, None), 9]]
