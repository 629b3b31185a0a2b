"""Runs of the real trainer that end because they are hopeless, and what they leave behind."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from protocol.wire.messages import Group, Lease
from tests.integration.runs import Run
from tests.scripted import made_up_group

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def one_is_too_much(lease: Lease, policy_version: int) -> Group:
    """The advantages of prompt 3 overflow."""
    rewards = [3e38, 3e38, 3e38, -3e38] if lease.prompt_id == 3 else None
    return made_up_group(lease, policy_version, rewards=rewards)


@pytest.mark.parametrize(("ranks", "base"), [(1, "none"), (2, "layers")])
def test_a_step_that_is_not_finite_ends_the_trainer_and_is_tried_once_more_by_a_resumed_one(
    start: Any, ranks: int, base: str
) -> None:
    run: Run = start(
        dataset={"shuffle": False},
        pipeline={"shard_base": base},
        trainer={"max_steps": 4, "scale_rewards": "none", "save_steps": 100},
    )
    trainer = run.trainer("--ranks", str(ranks))
    run.producer(answer=one_is_too_much)
    assert trainer.end(120) == 72, trainer.output[-3000:]
    assert "step 2 was not taken: loss" in trainer.output
    assert "Weights and optimizer are as before it; the batch is in" in trainer.output
    kept = json.loads((Path(run.config.run_dir) / "inspect" / "step-2" / "step.json").read_text())
    assert (kept["step"], kept["weights_not_finite"], len(kept["groups"])) == (2, [], 2)
    assert {group["group"].split("-")[1] for group in kept["groups"]} == {"2", "3"}
    assert [line["step"] for line in run.steps] == [1]

    trainer = run.trainer("--resume", "--ranks", str(ranks))
    assert trainer.end(120) == 72, trainer.output[-3000:]
    assert [line["step"] for line in run.steps] == [1]


def test_a_run_that_nothing_can_be_learned_from_ends_and_says_why(start: Any) -> None:
    run: Run = start(guards={"max_groups_without_signal": 12})
    trainer = run.trainer()
    run.producer(answer=lambda lease, version: made_up_group(lease, version, rewards=[0.0] * 4))
    assert trainer.end(120) == 67, trainer.output[-3000:]
    assert "groups had rewards that differ (guards.max_groups_without_signal)" in trainer.output
    assert "every completion was worth 0" in trainer.output


def test_a_run_of_which_nothing_is_scored_ends_as_one_whose_rewards_fail(start: Any) -> None:
    run: Run = start(guards={"max_groups_without_signal": 12})
    trainer = run.trainer()
    run.producer(answer=lambda lease, version: made_up_group(lease, version, rewards=[math.nan] * 4))
    assert trainer.end(120) == 66, trainer.output[-3000:]
    assert "no completion was scored at all" in trainer.output
