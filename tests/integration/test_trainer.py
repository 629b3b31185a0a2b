"""The real `rl-trainer` process and a scripted producer over real sockets: whole runs, stopped, killed and resumed."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.wire.codec import decode
from protocol.wire.messages import Group, Lease
from replay.journal.reader import JournalReader
from slipstream.run_reader import ROLLOUTS, RunReader
from tests.scripted import made_up_group

from .runs import Run, eventually

pytestmark = pytest.mark.integration


def test_an_on_policy_run_from_start_to_end(start: Callable[..., Run]) -> None:
    run = start(pipeline={"max_staleness": 0, "sync_interval": 1}, trainer={"report_to": "tensorboard"})
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
    check_samples(run)
    check_tracker(run)

    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(run.model)
        before = base(input_ids=tokens).logits
        adapted = PeftModel.from_pretrained(base, Path(run.config.run_dir) / "adapter")
        difference = (adapted(input_ids=tokens).logits - before).abs().max().item()
    assert difference > 1e-4, "the final adapter changes nothing"


def check_tracker(run: Run) -> None:
    """One of TRL's gets every number of every step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = Path(run.config.run_dir).rglob("*tfevents*")
    accumulator = EventAccumulator(str(events.parent)).Reload()
    for name in ("reward", "staleness/mean", "sampling/importance_sampling_ratio/mean", "loss", "grad_norm"):
        assert [scalar.step for scalar in accumulator.Scalars(f"train/{name}")] == run.column("step")
    assert [scalar.value for scalar in accumulator.Scalars("train/reward")] == pytest.approx(run.column("reward"))


def check_samples(run: Run) -> None:
    """Per step a completion with the best reward and one with the worst, as the journal has them."""
    samples = RunReader(Path(run.config.run_dir)).lines(ROLLOUTS)
    best_and_worst = [(step, step - 1, 0, reward) for step in range(1, 7) for reward in (1.0, 0.0)]
    assert [(it["step"], it["policy_version"], it["staleness"], it["reward"]) for it in samples] == best_and_worst
    assert [it["advantage"] > 0 for it in samples] == [True, False] * 6
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    with closing(JournalReader(run.config.journal_file)) as reader:
        for line, frame in zip(samples, reader.frames(line["group"] for line in samples), strict=True):
            group = decode(frame)
            assert isinstance(group, Group)
            lengths, ids = (np.frombuffer(it, "<i4") for it in (group.completion_lengths, group.completion_ids))
            texts = tokenizer.batch_decode(np.split(ids, lengths.cumsum()[:-1]))
            assert (line["completion"], line["length"]) in zip(texts, lengths, strict=True)
            assert line["prompt"] == tokenizer.decode(np.frombuffer(group.prompt_ids, "<i4"))


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
    assert stopped_at <= second.versions[0] <= total  # groups that were ready before the stop are trained first
    assert second.versions[-1] == total
    assert run.steps[-1]["counts"]["trained"] == 2 * total, "counts go on too"

    misfit = run.trainer("--resume", "--set", "lora.r=8")
    assert misfit.end() == 78
    assert "lora.r is 8 now and was " in misfit.output
    finished = run.trainer("--resume", "--set", f"trainer.max_steps={total}")
    assert finished.end() == 0, "nothing is left to do"
    assert run.column("step") == list(range(1, total + 1))


def slowly(lease: Lease, version: int) -> Group:
    time.sleep(0.2)
    return made_up_group(lease, version)


def stands_still(run: Run) -> bool:
    """Return whether no step is taken for a second."""
    before = run.column("step")
    time.sleep(1.0)
    return run.column("step") == before


def test_a_producer_that_disappears_is_missed_and_welcomed_back(start: Callable[..., Run]) -> None:
    run = start(trainer={"max_steps": 12})
    slow = run.producer("slow", answer=slowly)
    trainer = run.trainer()
    run.wait_for_step(2)
    slow.stop()  # without a goodbye
    trainer.wait_for(r"producer slow left \((silent for|it cannot be).*\); \d+ prompts go out again", 30)
    eventually(lambda: stands_still(run))  # the groups that had come are trained
    assert run.steps[-1]["step"] < 12, "nobody generates, nobody trains"
    assert trainer.process.poll() is None
    run.producer("other")
    assert trainer.end() == 0
    assert run.column("step") == list(range(1, 13))
    assert run.steps[-1]["counts"]["failed_released"] >= 1
    assert run.steps[-1]["counts"]["trained"] == 24


def test_two_producers_share_the_work(start: Callable[..., Run]) -> None:
    run = start(
        pipeline={"groups_per_step": 4, "max_staleness": 2},
        trainer={"max_steps": 10},
        observability={"log_format": "json", "rollout_samples": 0},
    )

    def unhurried(lease: Lease, version: int) -> Group:
        time.sleep(0.05)
        return made_up_group(lease, version)

    trainer = run.trainer()
    producers = [run.producer(name, capacity=0, answer=unhurried) for name in ("left", "right")]
    eventually(lambda: all(producer.versions for producer in producers))  # one may connect seconds after the other
    for producer in producers:
        producer.capacity = 4  # which its next heartbeat says
    assert trainer.end() == 0
    for producer in producers:
        producer.join(10)
        assert producer.farewell == "finished"
        assert len(producer.acks) >= 5
    answered_leases = [ack.lease_id for producer in producers for ack in producer.acks]
    assert len(answered_leases) == len(set(answered_leases))
    assert max(run.column("staleness/max")) <= 2
    records = [json.loads(line) for line in trainer.output.splitlines()]  # nothing is written but JSON
    steps = [record for record in records if "step" in record]
    assert [record["step"] for record in steps] == run.column("step")
    assert [record["reward"] for record in steps] == run.column("reward")
    assert [record["version"] for record in steps] == list(range(1, 11)), "the one that the step made"
    [run_id] = {record["run"] for record in records}
    assert len(run_id) == 16
    assert {record["role"] for record in records} == {"rl-trainer"}
    assert records[-1]["msg"] == "rl-trainer: finished at step 10 of 10"
    assert not (Path(run.config.run_dir) / "rollouts.jsonl").exists()


def test_batches_of_few_groups_train_and_are_trained_again_alike(start: Callable[..., Run]) -> None:
    """Of the first four answers all have signal, then every other, then only the eighth."""
    pipeline = {"groups_per_step": 4, "fill": "sampled"}
    run = start(pipeline=pipeline, trainer={"max_steps": 4}, replay={"keep_all": True})
    signals = iter([1, 1, 1, 1, *[0, 1, 0, 1], *[0, 0, 0, 0, 0, 0, 0, 1], *[1, 0, 1, 0]])

    def answer(lease: Lease, version: int) -> Group:
        return made_up_group(
            lease, version, rewards=None if next(signals, 1) else [0.0] * lease.sampling.num_generations
        )

    run.producer(answer=answer, capacity=1)
    assert run.trainer().end() == 0
    with closing(JournalReader(run.config.journal_file)) as reader:
        sizes = [len(batch.lease_ids) for batch in reader.batches()]
    assert sizes == [4, 2, 1, 2]
    assert run.steps[-1]["counts"]["trained"] == sum(sizes)
    again = run.folder / "again"
    trainer = run.trainer("--from-journal", run.config.run_dir, "--set", f"run_dir={again}")
    assert trainer.end() == 0
    adapter = "adapter/adapter_model.safetensors"
    assert (again / adapter).read_bytes() == (Path(run.config.run_dir) / adapter).read_bytes()


def test_a_stop_before_the_first_step_leaves_nothing(start: Callable[..., Run]) -> None:
    run = start()
    trainer = run.trainer()
    trainer.wait_for("waiting for producers")
    os.kill(trainer.process.pid, signal.SIGINT)
    assert trainer.end() == 0, "nothing was trained, so there is nothing to save"
    assert not run.config.checkpoints_dir.exists() or not list(run.config.checkpoints_dir.glob("checkpoint-*"))
    assert "rl-trainer: stopped at step 0 of 6; go on with --resume" in trainer.output


HANGING_TRANSFORM = """
import ctypes
from pathlib import Path

def to_prompt(row):
    if Path("{flag}").exists():
        ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock: no other thread of its process runs
    return row
"""


def test_a_transform_that_hangs_does_not_hold_up_the_end_of_a_start(start: Callable[..., Run], tmp_path: Path) -> None:
    flag, file = tmp_path / "hang", tmp_path / "transforms.py"
    own = f"# {time.time_ns()}\n"  # what a transform has made is kept, and an earlier run of the tests may have had this folder
    file.write_text(own + HANGING_TRANSFORM.format(flag=flag))
    run = start(dataset={"transform": f"{file}:to_prompt"})
    flag.touch()
    trainer = run.trainer()
    trainer.wait_for("the start waits for dataset.transform on row 0 of .* for 10 s", 90)
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.end() == 0
    flag.unlink()
    resumed, producer = run.trainer("--resume"), run.producer()
    assert resumed.end() == 0
    assert run.column("step") == [1, 2, 3, 4, 5, 6]
    assert producer.nacks == []
