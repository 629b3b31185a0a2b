"""A run that is killed is the run that would have been: the same batches, the same weights, bit for bit."""

import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ExitCode
from protocol.runtime import json_lines as rotated_lines
from replay.journal.reader import JournalReader
from slipstream.cli import run as slipstream
from tests.scripted import Answer, half_without_signal, made_up_episodes, made_up_group

from .pair import START_S
from .runs import Run, eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STEPS = 12


def adapters(run_dir: Path) -> dict[str, str]:
    """Digest of every adapter that the run kept, by its folder's name."""
    files = [
        *run_dir.glob("checkpoints/checkpoint-*/adapter_model.safetensors"),
        run_dir / "adapter/adapter_model.safetensors",
    ]
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def settings(**trainer: Any) -> dict[str, dict[str, Any]]:
    return {
        "pipeline": {"max_staleness": 2},
        "replay": {"keep_all": True},
        "lora": {"lora_dropout": 0.1},
        "trainer": {"max_steps": STEPS, "save_steps": 3} | trainer,
    }


def again_and_again() -> dict[str, dict[str, Any]]:
    """Groups stand in for those without signal, and prompts that nobody solved come back to the next policy. No lease is
    ahead of the policy, so that the trainer waits, and groups stand in, on a machine of any speed."""
    replay = {"keep_all": True, "mode": "signal", "min_size": 2, "max_share": 0.5, "max_times_sampled": 3}
    reroll = {"delay_versions": 1, "max_share": 0.5}
    return settings() | {"pipeline": {"max_staleness": 0}, "replay": replay, "reroll": reroll}


def train_again(run: Run, *arguments: str) -> Path:
    """The run's journal, trained by a trainer that is never killed."""
    again = run.folder / "again"
    trainer = run.trainer("--from-journal", run.config.run_dir, "--set", f"run_dir={again}", *arguments)
    assert trainer.end(120) == 0
    return again


@pytest.mark.parametrize(("num_iterations", "answer"), [(1, made_up_episodes), (2, made_up_group)])
def test_a_run_killed_at_three_points_ends_as_one_that_never_was(
    start: Callable[..., Run], num_iterations: int, answer: Answer
) -> None:
    answers = {"dataset": {"answer_column": "answer"}, "loss": {"ce_coef": 0.1}}
    run = start(**settings(num_iterations=num_iterations), **answers)
    run.producer(answer=answer)
    for kill_at in (2, 5, 10):  # without a checkpoint, and some steps after one
        trainer = run.trainer("--resume")
        run.wait_for_step(kill_at)
        trainer.kill()
    assert run.trainer("--resume").end(120) == 0
    assert run.column("step") == list(range(1, STEPS + 1))

    killed, never_killed = adapters(Path(run.config.run_dir)), adapters(train_again(run))
    saved = (3, 6, 9, 12) if num_iterations == 1 else (4, 6, 10, 12)  # after the last iteration over a batch
    assert set(killed) == {f"checkpoint-{step}" for step in saved} | {"adapter"}
    assert killed == never_killed
    assert len(set(killed.values())) == len(killed) - 1, "only the last checkpoint and the final adapter are the same"
    assert min(run.column("ce_loss")) > 0

    reader = JournalReader(run.config.journal_file)
    trained = [lease_id for batch in reader.batches() for lease_id in batch.lease_ids]
    reader.close()
    assert len(trained) == len(set(trained)) == STEPS // num_iterations * 2
    keys = [tuple(lease_id.split("-")[:2]) for lease_id in trained]
    assert len(set(keys)) == len(keys), "no prompt is trained twice in an epoch"


def test_a_run_with_stand_ins_and_rerolls_ends_as_one_that_never_was_killed(start: Callable[..., Run]) -> None:
    run = start(**again_and_again())
    run.producer(answer=half_without_signal, capacity=2)
    for kill_at in (3, 7, 10):
        trainer = run.trainer("--resume")
        run.wait_for_step(kill_at)
        trainer.kill()
    assert run.trainer("--resume").end(120) == 0
    assert run.column("step") == list(range(1, STEPS + 1))
    again = train_again(run)
    assert adapters(Path(run.config.run_dir)) == adapters(again)
    lines = rotated_lines.read(again / "steps.jsonl")
    for name in ("replay/share", "staleness/max", "policy_version"):
        assert [line[name] for line in lines] == run.column(name)

    with closing(JournalReader(run.config.journal_file)) as reader:
        batches = list(reader.batches())
        rows = {row.lease_id: row for row in reader.rows()}
    assert [len(batch.lease_ids) for batch in batches] == [2] * STEPS
    fresh = [lease_id for batch in batches for lease_id in batch.lease_ids[: batch.num_fresh]]
    uses = Counter(lease_id for batch in batches for lease_id in batch.lease_ids[batch.num_fresh :])
    assert len(fresh) == len(set(fresh))
    assert uses, "some groups stood in"
    assert set(uses) <= set(fresh)
    assert max(uses.values()) <= 2, "max_times_sampled counts the first training"
    assert {lease_id: rows[lease_id].num_replays for lease_id in uses} == uses
    assert run.steps[-1]["counts"]["trained"] == len(fresh)
    assert run.steps[-1]["counts"]["replayed"] == uses.total()

    came_back = [row for row in rows.values() if row.reroll]
    assert came_back, "some prompts came back"
    for row in came_back:
        (failed,) = [
            other
            for other in rows.values()
            if (other.epoch, other.prompt_id, other.reroll) == (row.epoch, row.prompt_id, row.reroll - 1)
            and other.outcome != "stale"
        ]
        assert (failed.verdict, row.verdict) == ("failed", "mixed")
        assert row.policy_version > failed.policy_version


def test_ready_groups_survive_the_trainer_and_a_copy_of_the_live_run_goes_on_too(start: Callable[..., Run]) -> None:
    """What was acknowledged and not yet trained is trained by the next process, before any producer is there."""
    run = start(**settings(max_steps=40))
    producer = run.producer()
    trainer = run.trainer()
    run.wait_for_step(3)
    copy = run.folder / "copy"
    assert slipstream(["journal", "--run", run.config.run_dir, "backup", "--to", str(copy)]) == 0
    eventually(lambda: run.column("step")[-1] % 3 == 1)  # a checkpoint is written after the next two
    trainer.kill()
    reached = run.steps[-1]["step"]
    producer.stop()
    acked = {ack.lease_id for ack in producer.acks if ack.outcome == "accepted"}
    reader = JournalReader(run.config.journal_file)
    assert acked <= {row.lease_id for row in reader.rows()}, "every acknowledged group is in the journal"
    reader.close()

    assert slipstream(["journal", "--run", str(copy), "verify"]) == 0
    copied = len(rotated_lines.read(copy / "steps.jsonl"))
    restored = run.trainer("--resume", "--set", f"run_dir={copy}", "--set", f"transport.endpoint=ipc://{copy}/c.ipc")
    again = run.trainer("--resume")
    again.wait_for(r"journal: \d+ groups ready, [1-9]\d* steps to train again with the same batches")
    eventually(lambda: again.output.count("; waiting for producers") == 3, START_S)  # each of the three
    run.wait_for_step(reached)
    eventually(lambda: len(rotated_lines.read(copy / "steps.jsonl")) >= copied, 60)
    assert restored.process.poll() is None


def test_training_again_needs_the_whole_journal_and_another_folder(start: Callable[..., Run]) -> None:
    run = start(**(settings(save_total_limit=1) | {"replay": {"keep_bytes": 0}}))
    run.producer()
    assert run.trainer().end(120) == 0
    same = run.trainer("--from-journal", run.config.run_dir)
    assert same.end() == ExitCode.CONFIG
    assert "choose another run_dir for the result" in same.output
    pruned = run.trainer("--from-journal", run.config.run_dir, "--set", f"run_dir={run.folder}/again")
    assert pruned.end() == ExitCode.JOURNAL
    assert "the groups of step 1 are not in the journal" in pruned.output
    assert "replay.keep_all: true" in pruned.output
