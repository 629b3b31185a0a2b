"""`max_staleness: auto` in the trainer: what steps show moves the leases, and a checkpoint remembers it."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consumer.app.wiring import staleness_controller
from consumer.link.commit_queue import RolloutStorage
from consumer.training.pipeline import LivePipeline
from consumer.waiting import ThreadErrors, WaitPolicy
from protocol.config.learning import ReplaySection
from protocol.config.run import RunConfig
from replay.journal.disk import DiskGuard
from replay.prompts.adaptive_staleness import WINDOW
from tests.unit.consumer.builders import live_buffer, run_config
from tests.unit.replay.builders import FillableJournal


def automatic(folder: Path, **pipeline: Any) -> RunConfig:
    return run_config(folder, Path("unused"), pipeline={"max_staleness": "auto", "auto_staleness": [1, 3]} | pipeline)


def leases(buffer) -> int:
    count = 0
    while buffer.lease("p", now=0.0, timeout_s=60.0) is not None:
        count += 1
    return count


def test_a_trainer_that_waits_leases_further_ahead_and_a_checkpoint_remembers(
    tmp_path: Path, journal: FillableJournal, caplog: pytest.LogCaptureFixture
) -> None:
    config = automatic(tmp_path)
    assert config.max_loras == 5, "the greatest staleness decides what the engine must hold"
    buffer = live_buffer(journal, max_staleness=config.pipeline.staleness_limit)
    controller = staleness_controller(config, {})
    pipeline = LivePipeline(
        RolloutStorage(buffer, journal, DiskGuard(tmp_path, 0.99)),
        SimpleNamespace(describe=lambda: ""),
        WaitPolicy(check=lambda: None, say=print, stall_timeout_s=60.0),
        ThreadErrors(),
        ReplaySection(),
        controller,
    )
    assert leases(buffer) == 4, "two groups a step, one version ahead"
    with caplog.at_level(logging.INFO):
        shown = [pipeline.observe(0.95, 0.5)["pipeline/max_staleness"] for _ in range(2 * WINDOW)]
    assert shown == [1.0] * (2 * WINDOW - 1) + [2.0]
    assert "max_staleness: widened 1 -> 2: the trainer waited 50% of the time for rollouts" in caplog.text
    assert leases(buffer) == 2
    again = staleness_controller(config, pipeline.state())
    assert again is not None
    assert again.staleness == 2
    assert pipeline.observe(None, 0.5)["pipeline/leased"] == 6.0


def test_a_fixed_staleness_is_left_alone(tmp_path: Path) -> None:
    assert staleness_controller(automatic(tmp_path, max_staleness=2), {}) is None
