"""`slipstream cluster` with real Ray nodes, a real trainer of two ranks, and producers whose engine is scripted."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from campaigns.cluster.machine import REPOSITORY, ClusterRun, cluster_run, eventually, kill, rank_of, raylet_of
from slipstream.cli import run as slipstream

from .runs import Run
from .warm_commands import WarmCommands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

UP = ("up", "--config", "run.yaml", "--gpus", "0", "--ranks", "2", "--trainer-node", "127.0.0.1", "--backup", "copies")


@pytest.fixture
def run(tmp_path: Path, start: "Callable[..., Run]", warm: WarmCommands) -> Iterator[ClusterRun]:
    """Of a configuration as a user writes it: without keys and endpoint."""
    start(trainer={"max_steps": 5000, "save_steps": 10}, sampling={"num_generations": 4, "max_completion_length": 4})
    file = tmp_path / "run.yaml"
    values = yaml.safe_load(file.read_text())
    del values["transport"]
    file.write_text(yaml.safe_dump(values))
    (tmp_path / "rewards.py").write_text(
        "def reward(completion_ids, **columns):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    )
    with cluster_run(tmp_path, num_nodes=2, CLUSTER_WARM=warm.python) as found:
        yield found


def rank_of_the_trainer(run: ClusterRun) -> psutil.Process:
    """Below the daemon, for which another process stands."""
    [file] = (run.run_dir / "metrics").glob("rl-trainer-*.json")
    [target] = json.loads(file.read_text())
    return rank_of(psutil.Process(int(target["labels"]["pid"])))


def those_that_run(run: ClusterRun, *names: str) -> dict[str, psutil.Process]:
    """Wait until these daemons run and no others, which an actor that is slow to answer puts off."""
    found: dict[str, psutil.Process] = {}

    def are_these() -> bool:
        found.clear()
        found.update(run.processes())
        return sorted(found) == sorted(names)

    eventually(are_these)
    return found


def test_a_run_goes_on_whatever_is_killed_and_ends_in_good_order(run: ClusterRun) -> None:
    watching = run.start(*UP, "--producers", "3")
    eventually(lambda: (run.run_dir / "steps.jsonl").exists())
    run.wait_for_steps(2)
    watching.send_signal(signal.SIGKILL)
    watching.wait(10)
    daemons = those_that_run(run, "producer-1", "producer-2", "producer-3", "trainer")
    for process in daemons.values():
        assert not [word for word in process.cmdline() if "secret" in word]

    kill(rank_of_the_trainer(run))
    kill(daemons["producer-1"])
    eventually(lambda: not daemons["trainer"].is_running())
    run.wait_for_steps(2)
    again = r"producer-1: ended with killed by SIGKILL; (starts|has started) again"
    eventually(lambda: re.search(again, run.command("logs", "--config", "run.yaml")))

    node = raylet_of(those_that_run(run, "producer-1", "producer-2", "producer-3", "trainer")["trainer"])
    run.nodes.say(f"kill {node}")
    run.nodes.say("add")
    said = run.command(*UP, "--detach")
    assert "found the run" in said
    run.wait_for_steps(2)

    assert "resuming at step" in run.command("logs", "trainer", "--config", "run.yaml")
    assert "no room for 50 producers" in run.command("scale", "--config", "run.yaml", "--producers", "50", code=79)
    run.command("scale", "--config", "run.yaml", "--producers", "2")
    left = those_that_run(run, "producer-1", "producer-2", "trainer").values()
    said = run.command("down", "--config", "run.yaml")
    assert "producer-1: ended with 0" in said
    assert "trainer: ended with 0" in said
    *_, copy = sorted((run.folder / "copies").glob("*/backup-*"))  # one more, where all this took ten minutes
    assert slipstream(["journal", "--run", str(copy), "verify"]) == 0
    assert not any(process.is_running() for process in left)
    assert (run.run_dir / f"checkpoints/checkpoint-{run.step()}").is_dir()
    assert slipstream(["journal", "--run", str(run.run_dir), "verify"]) == 0
    assert list((run.run_dir / "cluster/keys/authorized").iterdir())
    assert not [path for path in (run.run_dir / "cluster/keys").rglob("*.secret") if path.name != "trainer.secret"]
    run.command("status", "--config", "run.yaml", code=68)


def test_a_ray_of_this_machine_and_a_run_that_cannot_start(tmp_path: Path) -> None:
    values = {
        "run_dir": "run",
        "model": {"path": str(tmp_path)},
        "dataset": {"path": "gone.jsonl"},
        "rewards": {"functions": [{"function": "exact_match"}]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "slipstream", "cluster", "up", "--config", "run.yaml", "--gpus", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
    assert ended.returncode in (65, 78), ended.stdout + ended.stderr
    assert f"trainer: ended with {ended.returncode} | rl-trainer: error: " in ended.stdout
    assert "the run is down" in ended.stdout
    assert not (tmp_path / "run/cluster/ray.json").exists()
