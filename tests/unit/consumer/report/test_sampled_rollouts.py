"""Sampled completions: which ones, what stands in a line, and how much of the disk they take."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumer.learn.micro_batches import BatchRecipe
from consumer.report.sampled_rollouts import RolloutLog, chosen, shortened
from replay.batch_selection import TrainingBatch
from replay.rewards import RewardRecipe
from tests.unit.consumer.builders import rollout_group, run_config

RECIPE = BatchRecipe(
    rewards=RewardRecipe(np.array([1.0, 0.5], np.float32), scale_rewards="none"),
    num_generations=2,
    groups_per_step=1,
    max_tokens=100,
    tree=False,
    only_advantages=False,
    keeps_all_rows=False,
    pad_token_id=0,
    mask_truncated=False,
    seed=5,
)
FRESH = rollout_group(
    [[3], [4, 5]], rewards=[[1.0, 2.0], [0.0, math.nan]], truncated=[False, True], lease_id="0-7-0-1-s", version=3
)
OLD = rollout_group([[6, 7], [8]], rewards=[[0.5, 0.0], [1.0, 0.0]], lease_id="0-9-1-1-s", version=1)
BATCH = TrainingBatch(5, 1, 5, [FRESH, OLD], 1)
ADVANTAGES = RECIPE.rewards.advantages(BATCH.groups)


def log(folder: Path, *, first_step: int = 0, num_samples: int = 2, max_bytes: int = 10**6) -> RolloutLog:
    names = ("first", "second")
    config = run_config(
        folder, rewards={"functions": [{"function": f"rewards:{name}", "weight": 1.0} for name in names]}
    )
    settings = {"rollout_samples": num_samples, "rollouts_max_bytes": max_bytes}  # less than a run may have
    config = config.model_copy(update={"observability": config.observability.model_copy(update=settings)})
    return RolloutLog(config, RECIPE, lambda ids: " ".join(map(str, ids)), first_step)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in lines(path)]


def test_lines_by_hand(tmp_path: Path) -> None:
    log(tmp_path, num_samples=99).note(5, BATCH, ADVANTAGES, 4)
    written = lines(tmp_path / "rollouts.jsonl")
    assert len(written) == 4, "every completion once"
    assert min(line.pop("t") for line in written) > 1e9
    # totals 2, 0, 0.5, 1; advantages are their distances from the group's mean
    assert written[0] == {
        "step": 5,
        "group": "0-7-0-1-s",
        "prompt_id": 7,
        "policy_version": 3,
        "staleness": 1,
        "versions": {"3": 1},
        "stands_in": False,
        "prompt": "3 4",
        "completion": "3",
        "length": 1,
        "truncated": False,
        "rewards": {"first": 1.0, "second": 2.0},
        "reward": 2.0,
        "advantage": 1.0,
    }
    worst = written[1]
    assert (worst["completion"], worst["length"], worst["truncated"], worst["advantage"]) == ("4 5", 2, True, -1.0)
    assert worst["rewards"] == {"first": 0.0, "second": None}
    others = {line["completion"]: line for line in written[2:]}
    assert (others["6 7"]["reward"], others["6 7"]["advantage"]) == (0.5, -0.25)
    assert (others["8"]["stands_in"], others["8"]["staleness"], others["8"]["prompt_id"]) == (True, 3, 9)


def test_a_best_one_a_worst_one_and_then_others_are_chosen_by_seed_and_step() -> None:
    totals = np.array([1.0, 3.0, np.nan, 3.0, 1.0, 2.0])
    draws = [chosen(totals, 4, np.random.default_rng([5, step])) for step in range(40)]
    assert draws == [chosen(totals, 4, np.random.default_rng([5, step])) for step in range(40)]
    assert {draw[0] for draw in draws} == {1, 3}
    assert {draw[1] for draw in draws} == {0, 4}
    assert {row for draw in draws for row in draw[2:]} == set(range(6))
    assert all(len(set(draw)) == 4 for draw in draws)


def test_where_nothing_was_scored_any_will_do() -> None:
    assert sorted(chosen(np.array([np.nan, np.nan]), 9, np.random.default_rng(0))) == [0, 1]


def test_none_are_written_if_none_are_wanted(tmp_path: Path) -> None:
    log(tmp_path, num_samples=0).note(5, BATCH, ADVANTAGES, 4)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_forgets_the_steps_that_the_crash_undid(tmp_path: Path) -> None:
    place = log(tmp_path)
    place.note(1, BATCH, ADVANTAGES, 4)
    place.note(2, BATCH, ADVANTAGES, 4)
    (tmp_path / "rollouts.jsonl").rename(tmp_path / "rollouts.1.jsonl")
    place.note(3, BATCH, ADVANTAGES, 4)
    log(tmp_path, first_step=1).note(2, BATCH, ADVANTAGES, 4)
    assert steps(tmp_path / "rollouts.1.jsonl") == [1, 1]
    assert steps(tmp_path / "rollouts.jsonl") == [2, 2]


def test_a_full_disk_costs_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = log(tmp_path)
    place.note(1, BATCH, ADVANTAGES, 4)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        place.note(2, BATCH, ADVANTAGES, 4)
    place.note(3, BATCH, ADVANTAGES, 4)
    assert steps(tmp_path / "rollouts.jsonl") == [1, 1, 3, 3]


def test_of_long_texts_the_ends_are_kept() -> None:
    assert shortened("x" * 8192) == "x" * 8192
    assert shortened("a" * 5000 + "b" * 5000) == "a" * 4096 + "[... 1808 characters left out ...]" + "b" * 4096
