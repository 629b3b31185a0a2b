"""A producer that has an address, a key and a model, and nothing of the task: real vLLM, real TRL, CURVE on loopback."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.runtime import json_lines as rotated_lines
from protocol.runtime.scratch import PREFIX
from tests.integration.models import build_model
from tests.integration.pair import Daemon, end_well
from tests.integration.warm_commands import WarmCommands
from tests.unit.protocol.channel_harness import reserve_port
from tests.unit.slipstream_extras.bundle.bundle_server import make_keys

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

REWARDS = """\
from judging.scores import score

def various(completions, **_):
    return [score(text) for text in completions]
"""
SCORES = "def score(text):\n    return {base} + float(sum(map(ord, text)) % 7)\n"


@pytest.fixture
def task(short_dir: Path) -> Iterator[Path]:
    """What the trainer's host has, with the keys of both in other folders beside it, and an empty one."""
    folder = short_dir / "task"
    (folder / "judging").mkdir(parents=True)
    (short_dir / "empty").mkdir()
    build_model("qwen2", short_dir / "model")
    make_keys(short_dir / "keys", "gpu01")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "judging" / "scores.py").write_text(SCORES.format(base=0.0))
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(40)))
    with ExitStack() as stack:
        ports = [reserve_port(stack) for _ in range(2)]
        config: dict[str, Any] = {
            "run_dir": "run",
            "model": {"path": str(short_dir / "model"), "dtype": "float32"},
            "dataset": {"path": "data.jsonl"},
            "rewards": {"functions": [{"function": "rewards.py:various"}], "num_workers": 1},
            "sampling": {"num_generations": 4, "max_completion_length": 8},
            "pipeline": {"groups_per_step": 2, "max_staleness": 1, "fill": "full"},
            "transport": {
                "keys": str(short_dir / "keys" / "trainer"),
                "endpoint": f"tcp://127.0.0.1:{ports[0]}",
                "blob_endpoint": f"tcp://0.0.0.0:{ports[1]}",
                "heartbeat_interval_s": 0.5,
                "heartbeat_timeout_s": 20.0,
            },
            "lora": {"r": 8, "lora_alpha": 16},
            "engine": {"max_model_len": 64, "max_num_seqs": 16, "enforce_eager": True, "num_gpu_blocks_override": 64},
            "trainer": {"max_steps": 1000, "learning_rate": 1e-3, "gradient_checkpointing": False, "save_steps": 2},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        yield folder


def scratch_of(daemon: Daemon) -> Path:
    folder = Path(os.readlink(f"/proc/{daemon.process.pid}/cwd"))
    assert folder.parent.name.startswith(PREFIX)
    return folder


def test_it_trains_from_an_empty_folder_and_follows_a_changed_reward(
    task: Path, monkeypatch: pytest.MonkeyPatch, daemons: list[Daemon], warm: WarmCommands
) -> None:
    around, values = task.parent, yaml.safe_load((task / "run.yaml").read_text())
    monkeypatch.chdir(task)
    trainer = Daemon("consumer.app.cli", around / "trainer-1.log", "--config", "run.yaml")
    daemons.append(trainer)
    monkeypatch.chdir(around / "empty")
    producer = Daemon(
        "producer.app.cli",
        around / "producer.log",
        *("--connect", values["transport"]["endpoint"], "--keys", "../keys/gpu01", "--model", "../model"),
        *("--set", "transport.identity=gpu01"),
        python=warm.python,  # which it becomes when it starts again
    )
    daemons.append(producer)
    trainer.wait_for(r"step 3/", beside=producer)
    before = scratch_of(producer)
    assert {str(path.relative_to(before)) for path in before.rglob("*.[py]*") if path.is_file()} >= {
        "run.yaml",
        "rewards.py",
        "judging/scores.py",
    }
    received = (before / "run.yaml").read_text()
    assert not any(secret in received for secret in (str(around), "keys", "data.jsonl", "127.0.0.1"))

    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.end() == 0, trainer.last_words
    (task / "judging" / "scores.py").write_text(SCORES.format(base=1000.0))
    monkeypatch.chdir(task)
    taken = rotated_lines.read(task / "run" / "steps.jsonl")
    assert max(step["reward"] for step in taken) < 1000
    resumed = Daemon(
        "consumer.app.cli",
        around / "trainer-2.log",
        *("--config", "run.yaml", "--resume", "--set", f"trainer.max_steps={taken[-1]['step'] + 8}"),
    )
    daemons.append(resumed)
    producer.wait_for(r"the trainer has another bundle \(\w+\): starting again with it", beside=resumed)
    producer.wait_for(r"(?s)starting again with it.*got bundle .*connected to the trainer of run", beside=resumed)
    assert producer.process.poll() is None
    assert not before.parent.exists(), "nothing of the old code stays"
    end_well(resumed, producer)
    assert rotated_lines.read(task / "run" / "steps.jsonl")[-1]["reward"] >= 1000, "scored by the new code"
    assert list((around / "empty").iterdir()) == [], "it leaves nothing behind"
