"""A run under a real SLURM of two nodes, by the files of deploy/slurm; only the engine is scripted."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from campaigns.chaos import run_folder
from protocol.channel.client import ZmqClient
from protocol.channel.keys import producer_keys
from protocol.config.loader import load_config
from protocol.runtime import json_lines as rotated_lines
from protocol.wire.model_folder import base_model_digest, tokenizer_digest
from tests.scripted import ScriptedProducer, facts

from .runs import eventually
from .slurm import Slurm, edited_scripts, free_ports
from .warm_commands import WarmCommands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
SCRIPTED = "from tests.scripted_engine import Pace, install; install(Pace(0.03, 0.1, 0.2))"
COMMANDS = {
    "rl-producer": f"{SCRIPTED}; from producer.app.cli import main",
    "slipstream": "from slipstream.cli import main",
}


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    with closing(Slurm()) as cluster:
        yield cluster


class Project:
    """A run's folder with its files for SLURM."""

    def __init__(self, folder: Path, slurm: Slurm, warm: WarmCommands, *, nodes: int = 1, **trainer: Any) -> None:
        self.folder, self.slurm = folder, slurm
        self.values = run_folder.prepare(folder, folder, 0, run_folder.DEFAULT)
        self.values["transport"]["endpoint"] = f"tcp://127.0.0.1:{free_ports(3)[0]}"
        self.values["transport"]["keys"] = "keys"
        self.values["transport"]["heartbeat_timeout_s"] = 4.0
        self.values["pipeline"]["stall_timeout_s"] = 240.0
        self.set(**trainer)
        programs = folder / "bin"
        programs.mkdir()
        texts = {
            name: f'#!{sys.executable}\nif __name__ == "__main__":\n    {code}; raise SystemExit(main())\n'
            for name, code in COMMANDS.items()
        }
        texts["rl-trainer"] = f'#!/bin/sh\nexec {warm.python} -m consumer.app.cli "$@"\n'
        for name, text in texts.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self._environment = slurm.environment | own
        edited_scripts(folder, programs, self.values["transport"]["endpoint"], folder / "model", nodes)

    def set(self, **trainer: Any) -> None:
        self.values["trainer"] |= trainer
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.values))

    def run(self, *command: str) -> str:
        command = (str(self.folder / "bin" / command[0]), *command[1:]) if command[0] in COMMANDS else command
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self) -> tuple[str, str]:
        """The jobs of the trainer and of two producers."""
        trainer, producers = re.findall(r": job (\d+)", self.run("./submit.sh", "2"))
        return trainer, producers

    @property
    def steps(self) -> list[int]:
        return [step["step"] for step in rotated_lines.read(self.folder / "run" / "steps.jsonl")]

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def producer(self, number: int) -> psutil.Process:
        """The daemon, and none of its children, which may have its command line."""
        words = {self.values["transport"]["endpoint"], f"transport.identity=producer-{number}"}
        found = [each for each in psutil.process_iter(["cmdline"]) if words <= set(each.info["cmdline"] or ())]
        return min(found, key=psutil.Process.create_time)

    def num_joined(self, producer: int) -> int:
        """Its processes that have joined the trainer."""
        return len(set(re.findall(rf"producer (producer-{producer}-\S+) joined", self.log("trainer"))))

    def wait_for_step(self, number: int) -> None:
        def reached() -> bool:
            assert "queued again" not in self.log("trainer"), self.log("trainer")[-3000:]
            return bool(self.steps) and self.steps[-1] >= number

        eventually(reached, 240)


def test_killed_producers_and_a_requeued_trainer_come_back_and_the_run_ends(
    tmp_path: Path, slurm: Slurm, warm: WarmCommands
) -> None:
    project = Project(tmp_path, slurm, warm)
    trainer, producers = project.submit()
    project.wait_for_step(2)
    assert slurm.fields(trainer)["NodeList"] == "n2"

    eventually(lambda: project.num_joined(1) == 1, 240)
    project.producer(1).kill()
    slurm.begin_again(f"{producers}_1")
    eventually(lambda: project.num_joined(1) == 2, 240)
    assert "exit code 137: queued again" in project.log("producer-1")
    assert slurm.fields(f"{producers}_0")["Restarts"] == "0"

    reached = project.steps[-1]
    project.set(max_steps=reached + 12)
    slurm.ask("scontrol", "requeue", trainer)
    slurm.begin_again(trainer)
    eventually(lambda: slurm.state(trainer) == "COMPLETED", 240)
    assert "resuming at step" in project.log("trainer")
    assert project.steps == list(range(1, project.steps[-1] + 1))
    assert json.loads((tmp_path / "run" / "trainer.json").read_text())["finished"] is True
    for number in (0, 1):  # the trainer told them that the run is over
        eventually(lambda number=number: slurm.state(f"{producers}_{number}") == "COMPLETED", 60)  # type: ignore[misc]


def test_a_trainer_of_two_nodes(tmp_path: Path, slurm: Slurm, warm: WarmCommands) -> None:
    project = Project(tmp_path, slurm, warm, nodes=2, max_steps=3)
    trainer, producers = project.submit()
    slurm.ask("scancel", producers)
    config, model = load_config(str(tmp_path / "run.yaml")), tmp_path / "model"
    name, keys = "producer-0-1-ab", producer_keys(tmp_path / "keys", "producer-0")
    channel = ZmqClient(name, config.control_endpoint, config.blob_endpoint, 2**26, keys)
    digests = {"base_model_digest": base_model_digest(model), "tokenizer_digest": tokenizer_digest(model)}
    producer = ScriptedProducer(channel, facts(**digests, reward_names=["parity"]), name=name).start()
    with ExitStack() as stack:
        stack.callback(producer.stop)
        eventually(lambda: slurm.state(trainer) == "COMPLETED", 240)
    assert slurm.fields(trainer)["NodeList"] == "n[1-2]"
    assert "ranks 1 to 1 of 2 begin here" in project.log("trainer")
    assert project.steps == [1, 2, 3]
