"""Whole runs of the real trainer in this process, with a producer that answers at once: what is published, reported and
committed at the end of every step.
"""

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

from consumer.app import run as run_module
from consumer.app.feed import BatchFeed
from consumer.app.live_run import LiveRun
from consumer.app.setup import RunStart
from consumer.learn import checkpoints as checkpoints
from consumer.learn.adapters import AdapterFolder
from consumer.learn.checkpoint_settings import settings_of
from consumer.learn.options import build_arguments, build_lora
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.commit_queue import RolloutStorage
from consumer.link.policy_store import PublishedPolicy
from consumer.link.probe import PolicyProbe
from consumer.report.steps import StepReport
from consumer.waiting import ThreadErrors, WaitPolicy
from protocol.runtime import json_lines as rotated_lines
from replay.journal.retention import DiskGuard
from replay.journal.writer import Journal
from replay.sources import ONE
from replay.staleness import StalenessBudget
from tests.unit.consumer.builders import (
    SHAPE,
    delivery,
    learning_metrics,
    live_buffer,
    rollout_group,
    run_config,
)

PROBE_ROWS = np.arange(3, 11, dtype=np.int32).reshape(1, 8)


class Run:
    """Everything of `consumer.app.daemon` but the sockets. The producer uses the newest policy, `behind` versions late."""

    trainer: SlipstreamTrainer

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
        self.probes: list[Any] = []
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
        found = checkpoints.starting_point(run_dir, checkpoints_dir, has_groups=journal.last_seq > 0, resume=resume)
        start = RunStart("run", found)
        self.replay.restore(start.state or None, step=start.step, shape=SHAPE)
        report = StepReport(
            run_dir, self.replay.totals, learning_metrics(), max_steps=99, first_step=start.step, show_bar=False
        )
        waits = WaitPolicy(check=self.produce, say=print, stall_timeout_s=60.0)
        self.feed = feed = BatchFeed(self.replay, self, waits)
        setup: Any = SimpleNamespace(
            config=self.config, arguments=self.arguments, budget=StalenessBudget(**options),
            settings=settings_of(self.config, self.arguments, build_lora(self.config)),
            checkpoint_limit=self.arguments.save_total_limit, prompts=SimpleNamespace(sources=ONE),
            stop=lambda: self.stop_at is not None and self.trainer.state.global_step >= self.stop_at,
        )  # fmt: skip
        heartbeat: Any = SimpleNamespace(errors=ThreadErrors())
        storage = RolloutStorage(self.replay, journal, DiskGuard(run_dir, 1.0))
        self.run = LiveRun(setup, start, feed, waits, report, storage, self, heartbeat)
        lora = build_lora(self.config)
        self.trainer = SlipstreamTrainer(self.config, self.arguments, lora, model, feed, self.run.commit_checkpoint)
        every, autocast = self.config.probe_every, self.trainer.accelerator.autocast
        self.run.attach(self.trainer, PolicyProbe(PROBE_ROWS, every, self.trainer.model, autocast))
        if found:
            self.trainer._load_from_checkpoint(str(found.folder))
        self.prepare()
        self.run.publish(start.step)
        try:
            self.trainer.train(resume_from_checkpoint=str(found.folder) if found else None)
        finally:
            self.run.close()
            report.close()
        self.state = self.replay.state()

    def prepare(self) -> None:
        """Before the first step."""

    # The intake that the others see.

    def wake(self) -> None: ...

    def check_refused(self, oldest_usable: int | None = None) -> None: ...

    def describe(self) -> str:
        return ""

    def publish(self, policy: PublishedPolicy) -> None:
        self.published.append((policy.version, policy.digest))
        self.probes.append(policy.probe)
        policy.release()
        self.replay.published(policy.version)

    def produce(self) -> None:
        self.run.flush()
        while (record := self.replay.lease("p", now=0.0, timeout_s=1e9)) is not None:
            number = record.task.key.prompt_id
            group = rollout_group(
                [[3 + number % 7] * (1 + number % 3), [4], [5, 6], [7]],
                rewards=[0.0, 1.0, 1.0, float(number % 2)],
                lease_id=record.lease_id,
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


@pytest.mark.long
def test_on_policy_every_group_is_of_the_version_that_trains(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model)
    assert [version for version, _ in run.published] == [0, 1, 2, 3, 4]
    assert len({digest for _, digest in run.published}) == 5, "every step moved the weights"
    assert column(run, "step") == [1, 2, 3, 4]
    assert column(run, "policy_version") == [0, 1, 2, 3]
    assert column(run, "staleness/max") == [0, 0, 0, 0]
    assert run.replay.totals["trained"] == 8
    assert run.replay.totals["stale"] == run.replay.totals["went_stale"] == 0
    with closing(Journal(run.config.journal_file)) as journal:
        told = journal.query("SELECT step, advantages FROM advantages ORDER BY step")
    assert [step for step, _ in told] == [1, 2, 3, 4]
    for _, advantages in told:  # rewards are 0, 1, 1 and, of every second prompt, 1
        of_groups = np.frombuffer(advantages, "<f4").reshape(2, 4)
        assert of_groups.sum(axis=1) == pytest.approx([0, 0], abs=1e-5)
        assert (of_groups[:, 0] < 0).all()
        assert (of_groups[:, 1:3] > 0).all()


@pytest.mark.long
def test_a_version_every_third_step(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model, pipeline={"sync_interval": 3}, trainer={"max_steps": 7})
    assert [version for version, _ in run.published] == [0, 1, 2]
    assert column(run, "policy_version") == [0, 0, 0, 1, 1, 1, 2]
    assert column(run, "staleness/max") == [0] * 7


@pytest.mark.long
def test_the_first_two_versions_and_every_second_carry_a_probe_that_moves_with_the_weights(
    tmp_path: Path, one_layer_model: Path
) -> None:
    run = Run(tmp_path, one_layer_model, swap={"probe_every": 2}, lora={"lora_dropout": 0.5})
    assert [len(probe.policy) for probe in run.probes] == [28, 28, 28, 0, 28]
    assert all((probe.token_ids, probe.row_length) == (PROBE_ROWS.tobytes(), 8) for probe in run.probes)
    assert {probe.base for probe in run.probes} == {run.probes[0].policy}, "version 0 is the base"
    logprobs = [np.frombuffer(probe.policy, np.float32) for probe in run.probes[::2]]
    assert all(np.abs(one - other).max() > 1e-6 for one, other in itertools.combinations(logprobs, 2))
    model = AutoModelForCausalLM.from_pretrained(one_layer_model)  # version 0 is the base model
    with torch.no_grad():
        base = model(torch.from_numpy(PROBE_ROWS).long()).logits[0].log_softmax(-1)
    expected = base[torch.arange(7), torch.from_numpy(PROBE_ROWS[0, 1:]).long()]
    np.testing.assert_allclose(logprobs[0], expected, rtol=float(100 * np.finfo(np.float32).eps))


@pytest.mark.long
def test_two_updates_per_batch(tmp_path: Path, one_layer_model: Path) -> None:
    run = Run(tmp_path, one_layer_model, trainer={"num_iterations": 2, "max_steps": 6})
    assert [version for version, _ in run.published] == [0, 1, 2, 3, 4, 5, 6]
    assert run.replay.totals["trained"] == 6, "three batches of two"
    assert column(run, "staleness/max") == [0, 0, 0, 0, 0, 0]  # when the batch is cut
    assert column(run, "policy_version") == [0, 1, 2, 3, 4, 5]  # the second update is one version on
    assert [wait > 0 for wait in column(run, "wait_s")] == [True, False] * 3


@pytest.mark.long
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
    assert logged["train_loss"] == pytest.approx(sum(column(run, "loss")) / 2), (
        "of every step, though nothing was logged"
    )
    assert all(norm > 0 for norm in column(run, "grad_norm"))


@pytest.mark.long
def test_transformers_record_of_what_was_logged_does_not_grow_with_the_run(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_MOST_LOGS", 3)
    run = Run(tmp_path, one_layer_model, trainer={"max_steps": 6, "save_steps": 5})
    assert [entry["step"] for entry in run.trainer.state.log_history[:2]] == [5, 6]
    saved = json.loads((run.config.checkpoints_dir / "checkpoint-5" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in saved["log_history"]] == [3, 4, 5]


@pytest.mark.long
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
    assert [column(second, name) for name in ("reward", "loss", "grad_norm")] == [
        column(whole, name) for name in ("reward", "loss", "grad_norm")
    ]
    assert second.state == whole.state
    assert second.samples == whole.samples
    assert [line["step"] for line in second.samples] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "top_entropy_quantile": 0.5}])
def test_a_batch_that_the_end_of_a_run_cut_goes_on_as_in_a_longer_run(
    tmp_path: Path, one_layer_model: Path, options: dict[str, Any]
) -> None:
    trainer = {"num_iterations": 3, "lr_scheduler_type": "constant", "learning_rate": 0.05, **options}
    whole = Run(tmp_path / "whole", one_layer_model, trainer=trainer | {"max_steps": 9})
    first = Run(tmp_path / "cut", one_layer_model, trainer=trainer | {"max_steps": 4})
    second = Run(tmp_path / "cut", one_layer_model, resume=True, trainer=trainer | {"max_steps": 9})
    assert second.published[0] == first.published[-1] == whole.published[4]
    assert second.published[1:] == whole.published[5:]


@pytest.mark.long
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
    watch("groups go", LiveRun, "checkpointed")
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
    assert AdapterFolder.read(Path(run.config.run_dir) / "adapters" / "step-2", "what stays of checkpoint 2")
    assert [folder.name for folder in run.config.checkpoints_dir.glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.long
def test_a_rate_that_was_lowered_holds_when_a_run_goes_on(tmp_path: Path, one_layer_model: Path) -> None:
    Run(tmp_path, one_layer_model, stop_at=2, trainer={"learning_rate": 1e-3, "lr_scheduler_type": "constant"})
    resumed = Run(
        tmp_path, one_layer_model, resume=True, trainer={"learning_rate": 1e-4, "lr_scheduler_type": "constant"}
    )
    assert resumed.trainer.state.global_step == 4
    assert {group["lr"] for group in resumed.trainer.optimizer.param_groups} == {1e-4}
