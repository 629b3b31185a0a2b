"""Whole runs of the real trainer in this process, with a producer that answers at once: what is published, reported and
committed at the end of every step. Then `save` alone, on disks that fill up.
"""

import errno
import itertools
import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from consumer.checkpoints import folders as checkpoints
from consumer.publishing.probe import Probe
from consumer.reporting.sampled_rollouts import RolloutLog
from consumer.reporting.step_report import StepReport
from consumer.training import callbacks as run_control_module
from consumer.training.callbacks import RunControl
from consumer.training.feed import BatchFeed
from consumer.training.pipeline import LivePipeline
from consumer.training.trainer import SlipstreamTrainer, build_arguments, build_lora
from consumer.waiting import Patience, StopRequested
from protocol.errors import StalledError
from protocol.files import rotated_lines
from replay.journal.disk import DiskGuard
from replay.journal.writer import Journal
from replay.prompts.staleness import StalenessBudget
from tests.unit.consumer.builders import (
    SHAPE,
    Clock,
    delivery,
    learning_metrics,
    live_buffer,
    rollout_group,
    run_config,
)

PROBE_TOKENS = np.arange(3, 11, dtype=np.int32)


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
        self.probes: list[tuple[bytes, bytes]] = []
        self.state: dict[str, Any] = {}
        self.arguments = build_arguments(self.config, on_gpu=False, num_prompts=1000)
        with closing(Journal(self.config.journal_file)) as journal:
            self.train(journal, model, resume)

    def train(self, journal: Journal, model: Path, resume: bool) -> None:
        pipeline = self.config.pipeline
        options = {
            "groups_per_step": pipeline.groups_per_step,
            "max_staleness": pipeline.max_staleness,
            "sync_interval": pipeline.sync_interval,
            "num_iterations": self.arguments.num_iterations,
        }
        self.replay = live_buffer(journal, **options)
        run_dir, checkpoints_dir = Path(self.config.run_dir), self.config.checkpoints_dir
        start = checkpoints.starting_point(run_dir, checkpoints_dir, has_groups=journal.last_seq > 0, resume=resume)
        first_step = start.step if start else 0
        self.replay.restore(start.state if start else None, step=first_step, shape=SHAPE)
        report = StepReport(
            run_dir, self.replay.counts, learning_metrics(), max_steps=99, first_step=first_step, show_bar=False
        )
        patience = Patience(check=self.produce, say=print, stall_timeout_s=60.0)
        feed = BatchFeed(self.replay, self, patience)
        disk = DiskGuard(run_dir, 1.0)
        self.pipeline = LivePipeline(self.replay, journal, self, patience, disk, self.config.replay)
        self.control = control = RunControl(
            self.pipeline,
            StalenessBudget(**options),
            feed,
            report,
            patience,
            keep_checkpoints=self.arguments.save_total_limit,
            run_id="run",
            stop_requested=lambda: self.stop_at is not None and self.trainer.state.global_step >= self.stop_at,
        )
        self.trainer = SlipstreamTrainer(
            self.config, self.arguments, build_lora(self.config), model, feed, [control], control.save
        )
        control.trainer = self.trainer
        control.rollouts = RolloutLog.of(self.config, self.trainer.recipe, self.trainer._tokenizer.decode, first_step)
        control.probe = Probe(
            PROBE_TOKENS, self.config.swap.probe_every, self.trainer.model, self.trainer.accelerator.autocast
        )
        if start:
            self.trainer._load_from_checkpoint(str(start.folder))
        self.prepare()
        control.publish(first_step)
        try:
            self.trainer.train(resume_from_checkpoint=str(start.folder) if start else None)
        finally:
            self.pipeline.close()
            report.close()
        self.state = self.replay.state()

    def prepare(self) -> None:
        """Before the first step."""

    # The intake that the others see.

    def wake(self) -> None: ...

    def describe(self) -> str:
        return ""

    def publish(self, version: int, data: memoryview, digest: str, probe: tuple[bytes, bytes], release: Any) -> None:
        self.published.append((version, digest))
        self.probes.append(probe)
        release()
        self.replay.published(version)

    def produce(self) -> None:
        self.pipeline.flush()
        while (record := self.replay.lease("p", now=0.0, timeout_s=1e9)) is not None:
            number = record.work.key.prompt_id
            group = rollout_group(
                [[3 + number % 7] * (1 + number % 3), [4], [5, 6], [7]],
                rewards=[0.0, 1.0, 1.0, float(number % 2)],
                group_id=record.lease_id,
                version=max(record.policy_floor, self.published[-1][0] - self.behind),
            )
            self.replay.offer([delivery(group)])

    @property
    def steps(self) -> list[dict[str, Any]]:
        return rotated_lines.read(Path(self.config.run_dir) / "steps.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [line | {"t": None} for line in rotated_lines.read(Path(self.config.run_dir) / "rollouts.jsonl")]

    @property
    def committed(self) -> list[str]:
        return sorted(
            folder.name for folder in self.config.checkpoints_dir.iterdir() if checkpoints.is_committed(folder)
        )


def column(run: Run, name: str) -> list[Any]:
    return [step[name] for step in run.steps]


def test_on_policy_every_group_is_of_the_version_that_trains(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model)
    assert [version for version, _ in run.published] == [0, 1, 2, 3, 4]
    assert len({digest for _, digest in run.published}) == 5, "every step moved the weights"
    assert column(run, "step") == [1, 2, 3, 4]
    assert column(run, "policy_version") == [0, 1, 2, 3]
    assert column(run, "staleness/max") == [0, 0, 0, 0]
    assert run.replay.counts["trained"] == 8
    assert run.replay.counts["stale"] == run.replay.counts["went_stale"] == 0


def test_a_version_every_third_step(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model, pipeline={"sync_interval": 3}, trainer={"max_steps": 7})
    assert [version for version, _ in run.published] == [0, 1, 2]
    assert column(run, "policy_version") == [0, 0, 0, 1, 1, 1, 2]
    assert column(run, "staleness/max") == [0] * 7


def test_every_second_version_carries_a_probe_that_moves_with_the_weights(
    tmp_path: Path, one_layer_model: Path
) -> None:
    run = Run(tmp_path, one_layer_model, swap={"probe_every": 2}, lora={"lora_dropout": 0.5})
    assert [len(ids) for ids, _ in run.probes] == [32, 0, 32, 0, 32]
    assert run.probes[0][0] == PROBE_TOKENS.tobytes()
    logprobs = [np.frombuffer(values, np.float32) for _, values in run.probes[::2]]
    assert [len(values) for values in logprobs] == [7, 7, 7]
    assert all(np.abs(one - other).max() > 1e-6 for one, other in itertools.combinations(logprobs, 2))
    model = AutoModelForCausalLM.from_pretrained(one_layer_model)  # version 0 is the base model
    with torch.no_grad():
        base = model(torch.from_numpy(PROBE_TOKENS).long()[None]).logits[0].log_softmax(-1)
    expected = base[torch.arange(7), torch.from_numpy(PROBE_TOKENS[1:]).long()]
    np.testing.assert_allclose(logprobs[0], expected, rtol=100 * np.finfo(np.float32).eps)


def test_a_slow_producer_stays_within_max_staleness(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model, behind=5, pipeline={"max_staleness": 2}, trainer={"max_steps": 6})
    assert column(run, "staleness/max") == [0, 1, 2, 2, 2, 2]


def test_two_updates_per_batch(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model, trainer={"num_iterations": 2, "max_steps": 6})
    assert [version for version, _ in run.published] == [0, 1, 2, 3, 4, 5, 6]
    assert run.replay.counts["trained"] == 6, "three batches of two"
    assert column(run, "staleness/max") == [0, 0, 0, 0, 0, 0]  # when the batch is cut
    assert column(run, "policy_version") == [0, 1, 2, 3, 4, 5]  # the second update is one version on
    assert [wait > 0 for wait in column(run, "wait_s")] == [True, False] * 3


def test_numbers_of_a_step_are_over_all_its_micro_batches(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(
        tmp_path,
        one_layer_model,
        pipeline={"trainer_tokens_per_micro_batch": 8},
        trainer={"max_steps": 2, "logging_steps": 5},
    )
    name = "sampling/importance_sampling_ratio"
    [logged] = [entry for entry in run.trainer.state.log_history if f"{name}/mean" in entry]
    assert logged[f"{name}/mean"] == pytest.approx(sum(column(run, f"{name}/mean")) / 2), "TRL's mean over everything"
    for step in run.steps:
        assert step[f"{name}/min"] < step[f"{name}/mean"] < step[f"{name}/max"]
    assert logged[f"{name}/min"] > min(column(run, f"{name}/min")), "TRL's is the mean of minima"


def test_transformers_record_of_what_was_logged_does_not_grow_with_the_run(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_control_module, "_MOST_LOGS", 3)
    run = Run(tmp_path, one_layer_model, trainer={"max_steps": 6, "save_steps": 5})
    assert [entry["step"] for entry in run.trainer.state.log_history[:2]] == [5, 6]
    saved = json.loads((run.config.checkpoints_dir / "checkpoint-5" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in saved["log_history"]] == [3, 4, 5]


def test_a_stop_request_ends_the_run_with_a_committed_checkpoint(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model, stop_at=2)
    assert run.trainer.state.global_step == 2
    assert run.committed == ["checkpoint-2"]
    state = json.loads((run.config.checkpoints_dir / "checkpoint-2" / "pipeline_state.json").read_text())
    assert (state["step"], state["run_id"]) == (2, "run")
    assert state["counts"]["trained"] == 4
    assert column(run, "step") == [1, 2]


@pytest.mark.long
def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path, one_layer_model: Path) -> None:
    whole = Run(tmp_path / "whole", one_layer_model, lora={"lora_dropout": 0.2})
    Run(tmp_path / "halves", one_layer_model, stop_at=2, lora={"lora_dropout": 0.2})
    second = Run(tmp_path / "halves", one_layer_model, resume=True, lora={"lora_dropout": 0.2})
    assert second.published == whole.published[2:], "same versions, and the very same weights"
    assert column(second, "step") == [1, 2, 3, 4]
    assert [step["reward"] for step in second.steps] == [step["reward"] for step in whole.steps]
    assert second.state == whole.state
    assert second.samples == whole.samples
    assert [line["step"] for line in second.samples] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_checkpoints_and_stops_wait_for_the_last_iteration_over_a_batch(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model, stop_at=7, trainer={"num_iterations": 3, "max_steps": 99, "save_steps": 4})
    assert run.committed == ["checkpoint-6", "checkpoint-9"], "due at 4 and 8, and the request came after 7"
    assert run.trainer.state.global_step == 9


@pytest.mark.long
def test_checkpoints_wait_for_a_step_that_publishes_and_stops_do_not(tmp_path: Path, one_layer_model: Path) -> None:
    settings = {"pipeline": {"sync_interval": 3}, "trainer": {"max_steps": 99, "save_steps": 4}}
    run = Run(tmp_path, one_layer_model, stop_at=7, **settings)
    assert run.committed == ["checkpoint-6", "checkpoint-7"], "due at 4; the request came after 7"


@pytest.mark.long
def test_a_run_that_ends_between_iterations_ends_there_and_can_go_on(tmp_path: Path, one_layer_model: Path) -> None:
    trainer = {"num_iterations": 2, "save_steps": 2}
    first = Run(tmp_path, one_layer_model, trainer=trainer | {"max_steps": 5})
    assert first.committed == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    second = Run(tmp_path, one_layer_model, resume=True, trainer=trainer | {"max_steps": 8})
    assert second.committed == ["checkpoint-2", "checkpoint-4", "checkpoint-5", "checkpoint-6", "checkpoint-8"]
    assert column(second, "step") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [version for version, _ in second.published] == [5, 6, 7, 8]
    with closing(Journal(second.config.journal_file)) as journal:
        rows = journal.query("SELECT step, last_step FROM groups WHERE step IS NOT NULL ORDER BY step")
    assert rows == [(1, 2), (1, 2), (3, 4), (3, 4), (5, 6), (5, 6), (7, 8), (7, 8)], "no batch is cut twice"


def test_old_checkpoints_go_only_after_the_new_one_counts_and_old_groups_after_them(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watch(name: str, owner: Any, function: str) -> None:
        original = getattr(owner, function)

        def watched(*args: Any, **options: Any) -> Any:
            steps = sorted(
                folder.name.removeprefix("checkpoint-")
                for folder in (tmp_path / "checkpoints").glob("checkpoint-*")
                if checkpoints.is_committed(folder)
            )
            seen.append(f"{name} beside {','.join(steps)}")
            return original(*args, **options)

        monkeypatch.setattr(owner, function, watched)

    watch("commit", checkpoints, "commit")
    watch("prune", checkpoints, "prune")
    watch("groups go", LivePipeline, "checkpointed")
    run = Run(tmp_path, one_layer_model, trainer={"save_steps": 2, "save_total_limit": 1})
    assert seen == [
        "commit beside ",
        "prune beside 2",
        "groups go beside 2",
        "commit beside 2",
        "prune beside 2,4",
        "groups go beside 4",
    ]
    assert run.committed == ["checkpoint-4"]
    assert [folder.name for folder in run.config.checkpoints_dir.glob("checkpoint-*")] == ["checkpoint-4"]


# Saving.


class Saving:
    """`RunControl.save` with a checkpoint of step 3, and a disk that `write` fills until `room_at`."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock = clock
        self.checkpoints_dir = folder / "checkpoints"
        self.checkpoints_dir.mkdir()
        self.staged = checkpoints.staging(self.checkpoints_dir) / "checkpoint-3"
        self.error: Exception | None = None
        self.room_at = float("inf")
        self.stop_at = float("inf")
        self.attempts = 0
        self.events: list[str] = []
        self.said: list[str] = []
        self.control = RunControl(
            self,
            StalenessBudget(2, 0),
            None,
            None,
            Patience(check=self.check, say=self.said.append, stall_timeout_s=60.0),
            keep_checkpoints=None,
            run_id="run",
            stop_requested=lambda: False,
        )
        self.control.trainer = SimpleNamespace(
            state=SimpleNamespace(global_step=3), args=SimpleNamespace(output_dir=str(self.checkpoints_dir))
        )

    def check(self) -> None:
        if self.clock.now >= self.stop_at:
            raise StopRequested

    def write(self) -> None:
        assert not self.staged.exists(), "every attempt starts anew"
        self.attempts += 1
        self.staged.mkdir(parents=True)
        (self.staged / "part").write_text("weights")
        if self.error is not None and self.clock.now < self.room_at:
            raise self.error

    def save(self) -> None:
        self.control.save(self.staged, self.write)

    # The pipeline that it sees.

    def state(self) -> dict[str, Any]:
        return {"journal_seq": 7}

    def checkpointed(self, checkpoints_dir: Path) -> None:
        self.events.append("checkpointed")


@pytest.fixture
def saving(tmp_path: Path, clock: Clock) -> Saving:
    return Saving(tmp_path, clock)


ENOSPC = OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_holds_the_state_of_its_moment(saving: Saving) -> None:
    saving.save()
    assert checkpoints.latest(saving.checkpoints_dir) == (
        saving.checkpoints_dir / "checkpoint-3",
        {"journal_seq": 7, "step": 3, "run_id": "run"},
    )
    assert (saving.attempts, saving.events) == (1, ["checkpointed"])


def test_a_full_disk_is_waited_for_and_the_checkpoint_written_anew(saving: Saving, usage: SimpleNamespace) -> None:
    usage.free = 10**9
    saving.error, saving.room_at = ENOSPC, 1011.0
    saving.save()
    assert saving.attempts == 45, "four times a second"
    assert saving.said == ["waiting for room for a checkpoint (10 s): the disk of run_dir is full"]
    assert checkpoints.is_committed(saving.checkpoints_dir / "checkpoint-3")
    assert saving.events == ["checkpointed"]


def test_the_error_of_a_library_on_a_full_disk_is_one_of_the_disk(saving: Saving, usage: SimpleNamespace) -> None:
    usage.free = 2**20 - 1
    saving.error, saving.room_at = RuntimeError("PytorchStreamWriter failed writing file"), 1001.0
    saving.save()
    assert saving.attempts == 5
    assert checkpoints.is_committed(saving.checkpoints_dir / "checkpoint-3")


def test_no_room_for_the_last_of_it_is_waited_for_too(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    original, refusals = checkpoints.commit, iter([ENOSPC, ENOSPC])

    def commit(staged: Path, state: dict[str, Any]) -> None:
        error = next(refusals, None)
        if error is not None:
            raise error
        original(staged, state)

    monkeypatch.setattr(run_control_module.checkpoints, "commit", commit)
    saving.save()
    assert saving.attempts == 3
    assert checkpoints.is_committed(saving.checkpoints_dir / "checkpoint-3")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.EIO, "Input/output error")])
def test_any_other_error_ends_the_run(saving: Saving, usage: SimpleNamespace, error: Exception) -> None:
    usage.free = 2**20
    saving.error = error
    with pytest.raises(type(error)) as caught:
        saving.save()
    assert caught.value is error
    assert (saving.attempts, saving.events) == (1, [])
    assert checkpoints.latest(saving.checkpoints_dir) is None


@pytest.mark.parametrize(
    ("stop_at", "ending"), [(1005.0, StopRequested), (float("inf"), StalledError)], ids=["stop", "stall"]
)
def test_a_disk_that_stays_full_ends_in_a_stop_or_a_stall_and_leaves_nothing_behind(
    saving: Saving, stop_at: float, ending: type[Exception]
) -> None:
    saving.error, saving.stop_at = ENOSPC, stop_at
    with pytest.raises(ending):
        saving.save()
    assert saving.events == []
    assert list(saving.checkpoints_dir.iterdir()) == []


def test_what_another_process_left_in_staging_is_cleared_first(saving: Saving) -> None:
    left = checkpoints.staging(saving.checkpoints_dir) / "checkpoint-2"
    left.mkdir(parents=True)
    saving.save()
    assert not left.exists()


def saves_at_the_end(saving: Saving, first_step: int) -> int:
    """Attempts to write when the run, started at `first_step`, ends at step 3."""

    def save(model: Any, trial: Any) -> None:
        saving.save()

    saving.control.trainer.model, saving.control.trainer._save_checkpoint = None, save
    saving.control.save_if_needed(first_step)
    return saving.attempts


def test_a_run_that_is_stopped_saves_what_it_trained_since_the_last_checkpoint(saving: Saving) -> None:
    assert saves_at_the_end(saving, 3) == 0, "nothing was trained"
    assert saves_at_the_end(saving, 2) == 1
    assert saves_at_the_end(saving, 2) == 1, "it counts already"
