"""How many tokens a pass may have: what was recorded, what all ranks agree on, what is left when the device refuses."""

from typing import Any

import pytest
import torch

from consumer.learn.micro_batches import StepSplitter, carry_over
from consumer.ranks.exchange import ALONE
from protocol.config.learning import FIRST_TOKENS
from protocol.errors import DeviceError
from replay.journal.schema import MicroBatchPlan
from tests.unit.consumer.builders import rollout_group
from tests.unit.consumer.learn.test_batches import RECIPE
from tests.unit.consumer.ranks.thread_ranks import ThreadRanks, on_ranks

GROUP = rollout_group([[1, 2, 3, 4], [5, 6]], prompt=[7, 8], rewards=[0.0, 1.0])  # rows of 6 and 4 tokens


def none_recorded(step: int) -> MicroBatchPlan | None:
    return None


def begun(splitter: StepSplitter, step: int = 1) -> int:
    """Begins a batch at this step; returns its number of passes."""
    splitter.begin(RECIPE, [GROUP])
    return len(splitter.split(step))


def test_a_run_goes_on_with_what_it_had_come_to_and_cuts_recorded_steps_as_they_were() -> None:
    rows = [MicroBatchPlan(3, 12, None), MicroBatchPlan(5, 6, b"state")]

    def recorded(step: int) -> MicroBatchPlan | None:
        return max((row for row in rows if row.step <= step), default=None, key=lambda row: row.step)

    splitter = StepSplitter("auto", ALONE, recorded)
    found = [(begun(splitter, step), splitter.tokens, splitter.random_state) for step in (4, 5, 6)]
    assert found == [(1, 12, None), (2, 6, b"state"), (2, 6, None)]
    rows.append(MicroBatchPlan(7, 12, None))
    assert (begun(splitter, 7), splitter.tokens) == (1, 12)
    splitter.measured(9)
    assert splitter.tokens == 12, "a run that has come to something else measures no more"


def test_a_run_begins_with_the_default_and_measures_once() -> None:
    splitter = StepSplitter("auto", ALONE, none_recorded)
    assert (begun(splitter), splitter.tokens) == (1, FIRST_TOKENS)
    splitter.measured(None)
    assert splitter.tokens == FIRST_TOKENS
    splitter.measured(6)
    assert (begun(splitter, 2), splitter.tokens) == (2, 6)


def test_a_fixed_number_is_neither_recorded_nor_measured_nor_halved() -> None:
    splitter = StepSplitter(12, ALONE, lambda step: MicroBatchPlan(step, 6, b"state"))
    assert (begun(splitter), splitter.tokens, splitter.random_state) == (1, 12, None)
    splitter.measured(6)
    assert splitter.tokens == 12
    with pytest.raises(DeviceError, match=r"12 tokens \(no 2 GiB\).*pipeline.trainer_tokens_per_micro_batch.*--resume"):
        splitter.halve("no 2 GiB")


def test_halving_goes_on_until_there_are_more_passes_and_ends_with_single_rows() -> None:
    splitter = StepSplitter("auto", ALONE, none_recorded)
    assert begun(splitter) == 1
    assert [batch["row"].tolist() for batch in splitter.halve("")] == [[0], [1]]
    assert splitter.tokens == 8, "the two rows take 12 with padding: the first number of halvings that parts them"
    with pytest.raises(DeviceError, match=r"no memory for a single completion with its prompt \(none left\)"):
        splitter.halve("none left")


def test_what_fixed_policies_said_of_a_row_stays_with_it() -> None:
    splitter = StepSplitter("auto", ALONE, none_recorded)
    splitter.begin(RECIPE, [GROUP])
    [whole] = splitter.split(1)
    whole["ref_per_token_logps"] = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, 0.0, 0.0]])
    [again] = splitter.split(2)
    assert again is whole
    long, short = splitter.halve("")
    assert long["ref_per_token_logps"].tolist() == [[-1.0, -2.0, -3.0, -4.0]]
    assert short["ref_per_token_logps"].tolist() == [[-5.0, -6.0]]
    back = RECIPE.tensors([GROUP])
    carry_over([long, short], back)
    assert torch.equal(back[0]["ref_per_token_logps"], whole["ref_per_token_logps"])


def test_a_first_step_over_a_batch_keeps_nothing_when_it_is_cut_again() -> None:
    """Run again, it is cut like this at once, and computes them in these passes."""
    splitter = StepSplitter("auto", ALONE, none_recorded)
    splitter.begin(RECIPE, [GROUP])
    [whole] = splitter.split(1)
    whole["ref_per_token_logps"] = torch.zeros(2, 4)
    assert not any("ref_per_token_logps" in batch for batch in splitter.halve(""))


def test_all_ranks_cut_alike() -> None:
    def work(ranks: ThreadRanks) -> Any:
        recorded = MicroBatchPlan(1, 12, b"state") if ranks.rank == 0 else MicroBatchPlan(1, 3, b"other")
        splitter = StepSplitter("auto", ranks, lambda step: recorded)
        splitter.tokens = FIRST_TOKENS
        splitter.begin(RECIPE, [GROUP])
        splitter.split(1)
        found = [(splitter.tokens, splitter.random_state)]
        splitter.tokens = FIRST_TOKENS
        splitter.measured(9 if ranks.rank else None)
        return [*found, splitter.tokens]

    assert on_ranks(2, work) == [[(12, b"state"), 9], [(12, None), 9]]
