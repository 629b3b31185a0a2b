"""What a user can get wrong with `rl-trainer`: each ends with a named exit code and words that say what to mend."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.wire.messages import Lease, Nack

from .runs import Run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["--set", "trainer.lr_scheduler_type=sinus"],
            78,
            "--set trainer.lr_scheduler_type=sinus: expected `linear`",
        ),
        (
            ["--set", "dataset.path=absent.jsonl"],
            65,
            f"dataset.path: there is no file {Path('absent.jsonl').absolute()}",
        ),
        (["--set", "model.path=/absent/model"], 78, "model.path: /absent/model does not exist"),
        (
            ["--set", "lora.target_modules=[qkv]"],
            78,
            "peft: Target modules {'qkv'} not found",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_refused_at_the_start(start: Callable[..., Run], arguments: list[str], code: int, words: str) -> None:
    trainer = start().trainer(*arguments)
    assert trainer.end() == code
    assert words in trainer.output
    assert "rl-trainer: error: " in trainer.output
    assert "Traceback" not in trainer.output


def test_a_dataset_that_changed_since_the_checkpoint(start: Callable[..., Run]) -> None:
    run = start()
    ledger = {"epoch": 0, "position": 3, "num_prompts": 39, "unsettled": []}
    checkpoint = run.checkpoint(3)
    checkpoint.mkdir(parents=True)
    state = {"step": 3, "run_id": "run", "ledger": ledger, "counts": {}, "journal_seq": 0}
    (checkpoint / "pipeline_state.json").write_text(json.dumps(state))
    trainer = run.trainer("--resume")
    assert trainer.end() == 65
    assert "the dataset has 40 prompts now and had 39 at the checkpoint; go on with the old one" in trainer.output
    assert "Traceback" not in trainer.output


def test_another_base_model_is_refused_with_the_fix_and_the_trainer_goes_on(start: Callable[..., Run]) -> None:
    run = start(trainer={"max_steps": 2})
    trainer = run.trainer()
    stranger = run.producer("stranger", changes={"base_model_digest": "a" * 64})
    stranger.join(60)
    assert stranger.rejected is not None
    [problem] = stranger.rejected.problems
    assert problem.startswith("the producer serves another base model (aaaaaaaaaaaa) than the trainer trains (")
    assert problem.endswith("): give both the same model.path and model.revision")
    trainer.wait_for("WARNING refused producer stranger: the producer serves another base model")

    second = run.trainer()  # while the first one waits
    assert second.end() == 73
    assert f"another rl-trainer is at work in {run.folder}/run; stop it, or choose another run_dir" in second.output
    third = run.trainer("--set", f"run_dir={run.folder}/elsewhere")  # on the same endpoint
    assert third.end() == 73
    assert "is in use by another process. Stop that trainer, or give this run an endpoint of its own" in third.output

    run.producer("fitting")
    assert trainer.end() == 0
    assert "rl-trainer: finished at step 2 of 2" in trainer.output


def test_rewards_that_always_fail_end_the_run_with_the_last_reason(start: Callable[..., Run]) -> None:
    run = start()

    def failing(lease: Lease, version: int) -> Nack:
        return Nack(lease.lease_id, "reward_failed", "reward: KeyError: 'answr'")

    trainer = run.trainer()
    producer = run.producer("p", answer=failing)
    assert trainer.end() == 66
    [said] = re.findall(r"^rl-trainer: error: .*", trainer.output, re.MULTILINE)
    assert "reward reward gave no number" in said
    assert "KeyError: 'answr'" in said
    assert "p could not answer a prompt: reward_failed: reward: KeyError: 'answr'" in trainer.output
    producer.join(20)
    assert producer.farewell == "stopping"
