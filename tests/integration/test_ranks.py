"""A trainer of several ranks, in real processes on the CPU."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from .pair import START_S, gone
from .runs import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def adapter(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


def trainer_status(run: Run) -> dict[str, Any]:
    [file] = (Path(run.config.run_dir) / "metrics").glob("rl-trainer-*.json")
    [address] = json.loads(file.read_text())[0]["targets"]
    return httpx.get(f"http://{address}/status").raise_for_status().json()


def other_ranks(pid: int) -> list[psutil.Process]:
    """Those that it started, or that are forks of it."""
    trainer = psutil.Process(pid)
    commands = [(child, child.cmdline()) for child in trainer.children(True)]
    return [child for child, command in commands if "consumer.app.follower" in command or command == trainer.cmdline()]


def test_two_ranks_train_what_one_trains(start: Callable[..., Run]) -> None:
    run = start(
        replay={"keep_all": True},
        dataset={"answer_column": "answer"},
        loss={"ce_coef": 0.1},
        trainer={"max_steps": 4, "optim": "sgd", "learning_rate": 0.1},
    )
    producer = run.producer()
    trainer = run.trainer("--ranks", "2", spawns=True)
    assert trainer.end(START_S) == 0, trainer.output  # the other rank imports its libraries
    producer.join(10)
    assert producer.farewell == "finished"
    assert run.column("step") == [1, 2, 3, 4]
    assert min(run.column("ce_loss")) > 0
    of_run = adapter(Path(run.config.run_dir))
    for ranks, name in ((2, "again"), (1, "one")):
        folder = run.folder / name
        again = run.trainer("--ranks", str(ranks), "--from-journal", run.config.run_dir, "--set", f"run_dir={folder}")
        assert again.end() == 0, again.output
        found = adapter(folder)
        for key, weights in of_run.items():
            if ranks == 2:
                assert torch.equal(found[key], weights), key
            else:
                torch.testing.assert_close(found[key], weights, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("how", "base"), [(signal.SIGKILL, "none"), (signal.SIGSTOP, "layers")])
def test_a_lost_rank_ends_the_run_by_name_and_it_goes_on(
    start: Callable[..., Run], how: signal.Signals, base: str
) -> None:
    run = start(trainer={"max_steps": 500}, pipeline={"shard_base": base})
    run.producer("first")
    trainer = run.trainer("--ranks", "2")
    run.wait_for_step(3)
    [other] = other_ranks(trainer.process.pid)
    began = time.monotonic()
    other.send_signal(how)
    assert trainer.end() == 77
    assert time.monotonic() - began < 30  # at most 7 on a machine that is not busy
    assert "rank 1" in trainer.output
    assert gone([other])
    total = run.steps[-1]["step"] + 3
    run.producer("second")
    resumed = run.trainer("--ranks", "2", "--resume", "--set", f"trainer.max_steps={total}")
    assert resumed.end() == 0, resumed.output
    assert run.column("step") == list(range(1, total + 1))


def test_a_stop_ends_all_and_the_run_goes_on_with_another_number(start: Callable[..., Run]) -> None:
    run = start(trainer={"max_steps": 500})
    run.producer("first")
    trainer = run.trainer("--ranks", "2")
    run.wait_for_step(3)
    numbers = trainer_status(run)["numbers"]
    assert numbers["rank_step_seconds"].keys() == numbers["rank_memory_bytes"].keys() == {"0", "1"}
    assert all(tokens > 0 for tokens in numbers["rank_tokens"].values())
    [other] = other_ranks(trainer.process.pid)
    for process in (psutil.Process(trainer.process.pid), other):
        listening = [at for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN]
        assert listening
        assert {at.laddr.ip for at in listening} == {"127.0.0.1"}
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.end() == 0, trainer.output
    assert gone([other])
    step = run.steps[-1]["step"]
    assert run.checkpoint(step).exists()
    for number, ranks in enumerate(("1", "3"), start=1):
        run.producer(f"then {number}")
        resumed = run.trainer("--ranks", ranks, "--resume", "--set", f"trainer.max_steps={step + 2 * number}")
        assert resumed.end() == 0, resumed.output
    assert run.column("step") == list(range(1, step + 5))


def test_nothing_is_left_when_rank_0_is_killed(start: Callable[..., Run]) -> None:
    run = start(trainer={"max_steps": 500})
    run.producer()
    trainer = run.trainer("--ranks", "3")
    run.wait_for_step(2)
    others = other_ranks(trainer.process.pid)
    assert len(others) == 2
    os.kill(trainer.process.pid, signal.SIGKILL)
    assert gone(others)
