"""Whole runs of the real trainer in this process, with a producer that answers at once: what is published, reported and
committed at the end of every step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consumer import checkpoints
from consumer.feed import BatchFeed
from consumer.progress import StepReport
from consumer.run_control import RunControl
from consumer.trainer import SlipstreamTrainer, build_arguments, build_lora
from replay.groups import RolloutGroup
from replay.staleness import StalenessBudget
from tests.unit.replay.builders import buffer

from .builders import rollout_group, run_config


class Run:
    """Everything of `consumer.daemon` but the sockets. The producer uses the newest policy, `behind` versions late."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        behind: int = 0,
        stop_at: int | None = None,
        resume: bool = False,
        **sections: Any,
    ) -> None:
        sections["pipeline"] = {"groups_per_step": 2, "max_staleness": 0} | sections.get("pipeline", {})
        sections["trainer"] = {"max_steps": 4, "save_steps": 1000} | sections.get("trainer", {})
        self.config = run_config(folder, model, **sections)
        self.behind = behind
        self.stop_at = stop_at
        self.published: list[tuple[int, str]] = []
        self.arguments = build_arguments(self.config, on_gpu=False, num_prompts=1000)
        pipeline = self.config.pipeline
        options = {
            "groups_per_step": pipeline.groups_per_step,
            "max_staleness": pipeline.max_staleness,
            "sync_interval": pipeline.sync_interval,
            "num_iterations": self.arguments.num_iterations,
        }
        self.replay = buffer(**options)
        start = checkpoints.starting_point(self.config.checkpoints_dir, resume)
        self.first_step = start[1]["step"] if start else 0
        if start:
            self.replay.restore(start[1], step=self.first_step)
        self.report = StepReport(folder, self.replay, max_steps=99, first_step=self.first_step, show_bar=False)
        self.feed = BatchFeed(self.replay, self, stop_requested=self.produce, say=print, stall_timeout_s=60.0)
        self.control = RunControl(
            self.replay,
            StalenessBudget(**options),
            self,
            self.feed,
            self.report,
            sync_interval=pipeline.sync_interval,
            keep_checkpoints=self.arguments.save_total_limit,
            run_id="run",
            stop_requested=lambda: self.stop_at is not None and self.trainer.state.global_step >= self.stop_at,
        )
        self.trainer = SlipstreamTrainer(
            self.config, self.arguments, build_lora(self.config), model, self.batches(), [self.control]
        )
        self.control.trainer = self.trainer
        if start:
            self.trainer._load_from_checkpoint(str(start[0]))
        self.control.publish(self.first_step)
        try:
            self.trainer.train(resume_from_checkpoint=str(start[0]) if start else None)
        finally:
            self.report.close()

    def batches(self) -> Iterator[list[RolloutGroup]]:
        for batch in self.feed:
            yield batch.groups

    # The intake that the others see.
    num_producers = 1

    def check(self) -> None: ...

    def wake(self) -> None: ...

    def describe(self) -> str:
        return ""

    def publish(self, version: int, data: bytes, digest: str) -> None:
        self.published.append((version, digest))
        self.replay.published(version)

    def produce(self) -> bool:
        while (record := self.replay.lease("p", now=0.0, timeout_s=1e9)) is not None:
            number = record.item.prompt_id
            self.replay.offer(
                rollout_group(
                    [[3 + number % 7] * (1 + number % 3), [4], [5, 6], [7]],
                    rewards=[0.0, 1.0, 1.0, float(number % 2)],
                    group_id=record.lease_id,
                    version=max(record.policy_floor, self.published[-1][0] - self.behind),
                )
            )
        return False

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (Path(self.config.run_dir) / "steps.jsonl").read_text().splitlines()]

    @property
    def committed(self) -> list[str]:
        return sorted(
            folder.name for folder in self.config.checkpoints_dir.iterdir() if checkpoints.is_committed(folder)
        )


def column(run: Run, name: str) -> list[Any]:
    return [step[name] for step in run.steps]


def test_on_policy_every_group_is_of_the_version_that_trains(tmp_path: Path, tiny_model: Path) -> None:
    run = Run(tmp_path, tiny_model)
    assert [version for version, _ in run.published] == [0, 1, 2, 3, 4]
    assert len({digest for _, digest in run.published}) == 5, "every step moved the weights"
    assert column(run, "step") == [1, 2, 3, 4]
    assert column(run, "policy_version") == [0, 1, 2, 3]
    assert column(run, "staleness/max") == [0, 0, 0, 0]
    assert run.replay.counts["trained"] == 8
    assert run.replay.counts["stale"] == run.replay.counts["went_stale"] == 0


def test_a_version_every_third_step(tmp_path: Path, tiny_model: Path) -> None:
    run = Run(tmp_path, tiny_model, pipeline={"sync_interval": 3}, trainer={"max_steps": 7})
    assert [version for version, _ in run.published] == [0, 1, 2]
    assert column(run, "policy_version") == [0, 0, 0, 1, 1, 1, 2]
    assert column(run, "staleness/max") == [0] * 7


def test_a_slow_producer_stays_within_max_staleness(tmp_path: Path, tiny_model: Path) -> None:
    run = Run(tmp_path, tiny_model, behind=5, pipeline={"max_staleness": 2}, trainer={"max_steps": 6})
    assert column(run, "staleness/max") == [0, 1, 2, 2, 2, 2]


def test_two_updates_per_batch(tmp_path: Path, tiny_model: Path) -> None:
    run = Run(tmp_path, tiny_model, trainer={"num_iterations": 2, "max_steps": 6})
    assert [version for version, _ in run.published] == [0, 1, 2, 3, 4, 5, 6]
    assert run.replay.counts["trained"] == 6, "three batches of two"
    assert column(run, "staleness/max") == [0, 0, 0, 0, 0, 0]  # when the batch is cut
    assert column(run, "policy_version") == [0, 1, 2, 3, 4, 5]  # the second update is one version on
    assert [wait > 0 for wait in column(run, "wait_s")] == [True, False] * 3


def test_numbers_of_a_step_are_over_all_its_micro_batches(tmp_path: Path, tiny_model: Path) -> None:
    run = Run(tmp_path, tiny_model, trainer={"per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 5})
    name = "sampling/importance_sampling_ratio"
    [logged] = [entry for entry in run.trainer.state.log_history if f"{name}/mean" in entry]
    assert logged[f"{name}/mean"] == pytest.approx(sum(column(run, f"{name}/mean")) / 2), "TRL's mean over everything"
    for step in run.steps:
        assert step[f"{name}/min"] < step[f"{name}/mean"] < step[f"{name}/max"]
    assert logged[f"{name}/min"] > min(column(run, f"{name}/min")), "TRL's is the mean of minima"


def test_a_stop_request_ends_the_run_with_a_committed_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    run = Run(tmp_path, tiny_model, stop_at=2)
    assert run.trainer.state.global_step == 2
    assert run.committed == ["checkpoint-2"]
    state = json.loads((run.config.checkpoints_dir / "checkpoint-2" / "pipeline_state.json").read_text())
    assert (state["step"], state["run_id"]) == (2, "run")
    assert state["counts"]["trained"] == 4
    assert column(run, "step") == [1, 2]


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path, tiny_model: Path) -> None:
    whole = Run(tmp_path / "whole", tiny_model)
    Run(tmp_path / "halves", tiny_model, stop_at=2)
    second = Run(tmp_path / "halves", tiny_model, resume=True)
    assert second.published == whole.published[2:], "same versions, and the very same weights"
    assert column(second, "step") == [1, 2, 3, 4]
    assert [step["reward"] for step in second.steps] == [step["reward"] for step in whole.steps]
    assert second.replay.state() == whole.replay.state()


def test_old_checkpoints_go_only_after_the_new_one_counts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def commit(folder: Path, state: dict[str, Any]) -> None:
        seen.append(
            sorted(place.name for place in folder.parent.glob("checkpoint-*") if checkpoints.is_committed(place))
        )
        original(folder, state)

    original = checkpoints.commit
    monkeypatch.setattr(checkpoints, "commit", commit)
    run = Run(tmp_path, tiny_model, trainer={"save_steps": 1, "save_total_limit": 1})
    assert seen == [[], ["checkpoint-1"], ["checkpoint-2"], ["checkpoint-3"]]
    assert run.committed == ["checkpoint-4"]
    assert [folder.name for folder in run.config.checkpoints_dir.glob("checkpoint-*")] == ["checkpoint-4"]
