"""The real `rl-trainer` process and a scripted producer over real sockets: whole runs, stopped, killed and resumed."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from protocol.config_file import load_config
from protocol.digests import base_model_digest, tokenizer_digest
from protocol.messages import Group, Lease
from protocol.zmq_channel import ZmqClient
from tests.scripted import ScriptedProducer, facts, made_up_group

from .models import build_model
from .pair import Daemon

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("trainer") / "model")


class Run:
    """One run directory, and the processes and producers that work on it."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack, **sections: Any) -> None:
        self.folder = folder
        self.model = model
        self.stack = stack
        self.config_file = folder / "run.yaml"
        rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(40)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values: dict[str, Any] = {
            "run_dir": str(folder / "run"),
            "model": {"path": str(model), "dtype": "float32"},
            "dataset": {"path": str(folder / "train.jsonl")},
            "rewards": {"functions": [{"function": "rewards:reward"}]},
            "sampling": {"num_generations": 4, "max_completion_length": 6},
            "pipeline": {"groups_per_step": 2},
            "transport": {"heartbeat_interval_s": 0.3, "heartbeat_timeout_s": 1.5},
            "lora": {"r": 4, "lora_alpha": 8},
            "trainer": {"max_steps": 6, "learning_rate": 1e-3, "gradient_checkpointing": False},
        }
        for name, section in sections.items():
            values[name] = values[name] | section
        self.config_file.write_text(yaml.safe_dump(values))
        self.config = load_config(str(self.config_file))

    def trainer(self, *arguments: str) -> Daemon:
        process = Daemon("consumer.cli", self.folder / "trainer.log", "--config", str(self.config_file), *arguments)
        self.stack.callback(process.kill)
        return process

    def producer(self, name: str = "scripted", **options: Any) -> ScriptedProducer:
        channel = ZmqClient(name, self.config.control_endpoint, self.config.blob_endpoint, 2**26)
        engine = facts(base_model_digest=base_model_digest(self.model), tokenizer_digest=tokenizer_digest(self.model))
        producer = ScriptedProducer(channel, engine, name=name, **options).start()
        self.stack.callback(producer.stop)
        return producer

    @property
    def steps(self) -> list[dict[str, Any]]:
        file = Path(self.config.run_dir) / "steps.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def column(self, name: str) -> list[Any]:
        return [step[name] for step in self.steps]

    def wait_for_step(self, number: int) -> None:
        eventually(lambda: bool(self.steps) and self.steps[-1]["step"] >= number)

    def checkpoint(self, step: int) -> Path:
        return self.config.checkpoints_dir / f"checkpoint-{step}"


def eventually(condition: Callable[[], Any], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path, short_dir: Path, model: Path) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:

        def make(**sections: Any) -> Run:
            sections["transport"] = {"endpoint": f"ipc://{short_dir}/control.ipc"} | sections.get("transport", {})
            sections["transport"] |= {"heartbeat_interval_s": 0.3, "heartbeat_timeout_s": 1.5}
            return Run(tmp_path, model, stack, **sections)

        yield make


def test_an_on_policy_run_from_start_to_end(start: Callable[..., Run]) -> None:
    run = start(pipeline={"max_staleness": 0, "sync_interval": 1})
    producer = run.producer()  # in either order: the producer is first here
    trainer = run.trainer()
    assert trainer.end() == 0
    producer.join(10)
    assert producer.farewell == "finished"
    assert "waiting for producers" in trainer.output
    assert "rl-trainer: finished at step 6 of 6" in trainer.output

    assert run.column("step") == [1, 2, 3, 4, 5, 6]
    assert run.column("staleness/max") == [0] * 6
    assert run.column("policy_version") == [0, 1, 2, 3, 4, 5]
    assert producer.versions == [0, 1, 2, 3, 4, 5, 6]
    assert {ack.outcome for ack in producer.acks} == {"accepted"}
    assert producer.nacks == []
    summary = json.loads((Path(run.config.run_dir) / "trainer.json").read_text())
    assert (summary["finished"], summary["steps"], summary["counts"]["trained"]) == (True, 6, 12)

    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(run.model)
        before = base(input_ids=tokens).logits
        adapted = PeftModel.from_pretrained(base, Path(run.config.run_dir) / "adapter")
        difference = (adapted(input_ids=tokens).logits - before).abs().max().item()
    assert difference > 1e-4, "the final adapter changes nothing"


def test_sigterm_commits_a_checkpoint_that_only_resume_goes_on_from(start: Callable[..., Run]) -> None:
    run = start(trainer={"max_steps": 500})
    producer = run.producer()
    trainer = run.trainer()
    run.wait_for_step(3)
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.end() == 0
    producer.join(10)
    assert producer.farewell == "stopping"
    stopped_at = run.steps[-1]["step"]
    assert f"rl-trainer: stopped at step {stopped_at} of 500; go on with --resume" in trainer.output
    assert (run.checkpoint(stopped_at) / "pipeline_state.json").is_file()

    again = run.trainer()
    assert again.end() == 78
    assert (
        f"already holds a run (checkpoint-{stopped_at}). Go on with it by --resume, or choose another" in again.output
    )

    total = stopped_at + 4
    resumed = run.trainer("--resume", "--set", f"trainer.max_steps={total}")
    second = run.producer()
    assert resumed.end() == 0
    assert run.column("step") == list(range(1, total + 1))
    assert run.column("policy_version") == list(range(total))
    assert second.versions[0] == stopped_at
    assert second.versions[-1] == total
    assert run.steps[-1]["counts"]["trained"] == 2 * total, "counts go on too"

    misfit = run.trainer("--resume", "--set", "lora.r=8")
    assert misfit.end() == 78
    assert "does not fit model.path and lora" in misfit.output
    finished = run.trainer("--resume", "--set", f"trainer.max_steps={total}")
    assert finished.end() == 0, "nothing is left to do"
    assert run.column("step") == list(range(1, total + 1))


def test_a_killed_trainer_goes_on_from_its_last_committed_checkpoint(start: Callable[..., Run]) -> None:
    run = start(trainer={"max_steps": 500, "save_steps": 4, "save_total_limit": 1})
    producer = run.producer()
    trainer = run.trainer()
    run.wait_for_step(10)
    trainer.kill()
    reached = run.steps[-1]["step"]
    [committed] = [int(file.parent.name[11:]) for file in run.config.checkpoints_dir.glob("*/pipeline_state.json")]
    assert committed % 4 == 0
    assert reached - 4 <= committed <= reached
    uncommitted = run.checkpoint(committed + 400)  # what a kill in the middle of saving leaves behind
    uncommitted.mkdir()

    total = committed + 6
    resumed = run.trainer("--resume", "--set", f"trainer.max_steps={total}")
    assert resumed.end() == 0
    assert f"resuming at step {committed} from {run.checkpoint(committed)}" in resumed.output
    assert run.column("step") == list(range(1, total + 1)), "undone steps leave no line"
    producer.join(10)
    assert producer.farewell == "finished", "the same producer served both trainers"
    assert producer.versions.index(committed) < len(producer.versions) - 6
    assert producer.versions[-6:] == list(range(committed + 1, total + 1))


def slowly(lease: Lease, version: int) -> Group:
    time.sleep(0.2)
    return made_up_group(lease, version)


def test_a_producer_that_disappears_is_missed_and_welcomed_back(start: Callable[..., Run]) -> None:
    run = start(trainer={"max_steps": 12})
    slow = run.producer("slow", answer=slowly)
    trainer = run.trainer()
    run.wait_for_step(2)
    slow.stop()  # without a goodbye
    trainer.wait_for(r"producer slow left \((silent for|it cannot be).*\); \d+ prompts go out again", 30)
    reached = run.steps[-1]["step"]
    time.sleep(1.0)
    assert run.steps[-1]["step"] <= reached + 1 < 12, "nobody generates, nobody trains"
    assert trainer.process.poll() is None
    run.producer("other")
    assert trainer.end() == 0
    assert run.column("step") == list(range(1, 13))
    assert run.steps[-1]["counts"]["released"] >= 1
    assert run.steps[-1]["counts"]["trained"] == 24


def test_two_producers_share_the_work(start: Callable[..., Run]) -> None:
    run = start(pipeline={"groups_per_step": 4, "max_staleness": 2}, trainer={"max_steps": 10})
    producers = [run.producer(name, capacity=4) for name in ("left", "right")]
    trainer = run.trainer()
    assert trainer.end() == 0
    for producer in producers:
        producer.join(10)
        assert producer.farewell == "finished"
        assert len(producer.acks) >= 5
    answered_leases = [ack.lease_id for producer in producers for ack in producer.acks]
    assert len(answered_leases) == len(set(answered_leases))
    assert max(run.column("staleness/max")) <= 2


def test_epochs_iterations_intervals_and_micro_batches_together(start: Callable[..., Run]) -> None:
    """40 prompts, 4 a step, half an epoch: 5 batches, each trained twice; a version every third step."""
    run = start(
        pipeline={"groups_per_step": 4, "max_staleness": 0, "sync_interval": 3},
        trainer={
            "max_steps": -1,
            "num_train_epochs": 0.5,
            "num_iterations": 2,
            "per_device_train_batch_size": 8,
            "beta": 0.05,
            "loss_type": "dr_grpo",
            "report_to": "none",
        },
    )
    producer = run.producer()
    trainer = run.trainer()
    assert trainer.end() == 0
    assert run.column("step") == list(range(1, 11))
    assert run.column("policy_version") == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    producer.join(10)
    assert producer.versions == [0, 1, 2, 3]
    assert run.steps[-1]["counts"]["trained"] == 20
    assert run.column("staleness/max") == [0] * 10, "cut at steps 0, 2, 4, 6, 8 under v0, v0, v1, v2, v2"
    assert all(step["kl"] >= 0 for step in run.steps)


def test_a_tracker_of_trl_gets_every_number_of_every_step(start: Callable[..., Run]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = start(trainer={"report_to": "tensorboard", "max_steps": 3})
    run.producer()
    assert run.trainer().end() == 0
    (events,) = Path(run.config.run_dir).rglob("*tfevents*")
    accumulator = EventAccumulator(str(events.parent)).Reload()
    for name in ("reward", "staleness/mean", "sampling/importance_sampling_ratio/mean", "loss", "grad_norm"):
        scalars = accumulator.Scalars(f"train/{name}")
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
    assert [scalar.value for scalar in accumulator.Scalars("train/reward")] == pytest.approx(run.column("reward"))


def test_a_stop_before_the_first_step_leaves_nothing(start: Callable[..., Run]) -> None:
    run = start()
    trainer = run.trainer()
    trainer.wait_for("waiting for producers")
    os.kill(trainer.process.pid, signal.SIGINT)
    assert trainer.end() == 0, "nothing was trained, so there is nothing to save"
    assert not run.config.checkpoints_dir.exists() or not list(run.config.checkpoints_dir.glob("checkpoint-*"))
    assert "rl-trainer: stopped at step 0 of 6; go on with --resume" in trainer.output
