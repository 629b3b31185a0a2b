"""The units as installed, on a machine that systemd runs: the real trainer, and a producer with a stand-in for vLLM."""

import json
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.errors import ExitCode
from protocol.runtime import json_lines as rotated_lines
from tests.integration.runs import eventually

from .machine import Machine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
TRAINER, PRODUCER = "rl-trainer.service", "rl-producer@cpu.service"
_PAUSE_S = 0.2  # asking systemd starts processes, and the daemons need the cores
_PATIENCE_S = 240.0  # daemons start from nothing here, with all their imports
RUN_DIR = "/var/lib/slipstream/run"
PREFIX = "/opt/slipstream"
PYTHON = Path(sys.base_prefix).resolve()
INTERPRETER = Path("/srv/python") / Path(vars(sys)["_base_executable"]).resolve().relative_to(PYTHON)
PACKAGES = Path(sysconfig.get_path("purelib"))
BINDS = {
    "/srv/repository": REPOSITORY,
    "/srv/python": PYTHON,
    f"{PREFIX}/{PACKAGES.relative_to(sys.prefix)}": PACKAGES,
}
PROGRAM = f"""#!/bin/sh
export LD_LIBRARY_PATH=/srv/python/lib PYTHONPATH=/srv/repository
exec {PREFIX}/bin/python -m MODULE "$@"
"""
PROGRAMS = {
    "rl-trainer": "consumer.app.cli",
    "rl-producer": "tests.faults.stand_in_producer",
    "slipstream": "slipstream",
}
RUN: dict[str, Any] = {
    "run_dir": RUN_DIR,
    "model": {"path": "/srv/model", "dtype": "float32"},
    "dataset": {"path": "/etc/slipstream/train.jsonl"},
    "rewards": {"functions": [{"function": "/etc/slipstream/rewards.py:reward"}], "num_workers": 1},
    "sampling": {"num_generations": 4, "max_completion_length": 8},
    "pipeline": {"groups_per_step": 2, "max_staleness": 3, "fill": "full"},
    "observability": {"trainer_metrics_port": 9464, "producer_metrics_port": 9465},
    "lora": {"r": 4, "lora_alpha": 8},
    "trainer": {"max_steps": 100_000, "save_steps": 10, "gradient_checkpointing": False},
}
FILES = {
    "run.yaml": yaml.safe_dump(RUN),
    "train.jsonl": "".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(2000)),
    "rewards.py": "def reward(completions, **_):\n    return [0.0, 1.0, 0.5, 0.25]\n",
    "pace": "0.5",
    "trainer.env": "RL_GPU=cpu\nOMP_NUM_THREADS=1\nHF_HUB_OFFLINE=1\n",
    "producer.env": "STAND_IN_PACE=/etc/slipstream/pace\nSTAND_IN_NEWS=/var/lib/slipstream/news\n",
}


class Systemd(Machine):
    """A machine on which the units are installed, and a run to go with them."""

    def install(self, model: Path) -> None:
        bin = self.path(f"{PREFIX}/bin")
        bin.mkdir()
        (bin / "python").symlink_to(INTERPRETER)
        (bin.parent / "pyvenv.cfg").write_text(f"home = {INTERPRETER.parent}\n")
        for name, module in PROGRAMS.items():
            (bin / name).write_text(PROGRAM.replace("MODULE", module))
            (bin / name).chmod(0o755)
        self.run("make", "-C", "/srv/repository", "install-systemd")
        shutil.copytree(model, self.path("/srv/model"))
        self.run("chmod", "--recursive", "a+rX", "/srv/model")
        for name, text in FILES.items():
            self.path(f"/etc/slipstream/{name}").write_text(text)
        for unit, watchdog_s in ((TRAINER, 8), ("rl-producer@.service", 5)):
            folder = self.path(f"/etc/systemd/system/{unit}.d")
            folder.mkdir(parents=True)
            (folder / "fast.conf").write_text(f"[Service]\nRestartSec=0.2\nWatchdogSec={watchdog_s}\n")
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "enable", "rl.target", TRAINER, PRODUCER)

    def give_keys(self) -> None:
        """From its next start on the run uses them; the secrets are where the units look for them and nowhere else."""
        keys = "/etc/slipstream/keys"
        for arguments in ("generate trainer", "generate first", "authorize first"):
            self.run(f"{PREFIX}/bin/slipstream", "keys", "--keys", keys, *arguments.split())
        self.run("install", "-d", "-m", "700", "/etc/credstore")
        self.run("mv", f"{keys}/trainer.secret", "/etc/credstore/slipstream.trainer")
        self.run("mv", f"{keys}/first.secret", "/etc/credstore/slipstream.producer-cpu")
        run = RUN | {"transport": {"endpoint": "tcp://127.0.0.1:5555", "keys": keys}}
        self.path("/etc/slipstream/run.yaml").write_text(yaml.safe_dump(run))

    def start(self) -> None:
        """Returns when both are ready; at once if they are."""
        self.run("systemctl", "start", "rl.target")
        self.wait(lambda: self.state(TRAINER) == self.state(PRODUCER) == "active")

    def state(self, unit: str) -> str:
        return self.show(unit, "ActiveState")

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def restarts(self, unit: str) -> int:
        return int(self.show(unit, "NRestarts"))

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")

    @property
    def step(self) -> int:
        """The newest."""
        lines = rotated_lines.read(self.path(f"{RUN_DIR}/steps.jsonl"))
        return int(lines[-1]["step"]) if lines else 0

    def wait(self, condition: Callable[[], bool]) -> None:
        try:
            eventually(condition, _PATIENCE_S, _PAUSE_S)
        except AssertionError as error:
            error.add_note(self.run("journalctl", "--no-pager", "--lines=60"))
            raise

    def see_it_go_on(self) -> None:
        before = self.step
        self.wait(lambda: self.step >= before + 3)

    def wait_for_journal(self, unit: str, *texts: str) -> None:
        """Until they are there: the journal gets lines some time after they were written, and after a process ended."""
        for text in texts:
            self.wait(lambda text=text: text in self.journal(unit))  # type: ignore[misc]

    def signal(self, unit: str, signal: str) -> None:
        self.run("systemctl", "kill", f"--signal={signal}", "--kill-whom=main", unit)


@pytest.fixture(scope="module")
def machine(model: Path) -> Iterator[Systemd]:
    with Systemd(BINDS) as result:
        result.install(model)
        yield result


def test_the_units_start_and_the_run_begins(machine: Systemd) -> None:
    machine.start()
    machine.see_it_go_on()
    for unit, port in ((TRAINER, 9464), (PRODUCER, 9465)):
        assert machine.show(unit, "StatusText")
        assert (machine.show(unit, "User"), machine.show(unit, "Slice")) == ("slipstream", "rl.slice")
        fetch = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/readyz').status)"
        assert machine.run("env", "LD_LIBRARY_PATH=/srv/python/lib", f"{PREFIX}/bin/python", "-c", fetch) == "200"


@pytest.mark.parametrize("unit", [TRAINER, PRODUCER])
def test_a_killed_daemon_is_started_again_and_the_run_goes_on(machine: Systemd, unit: str) -> None:
    machine.start()
    before = machine.restarts(unit)
    machine.signal(unit, "KILL")
    machine.wait(lambda: machine.restarts(unit) > before and machine.state(unit) == "active")
    machine.see_it_go_on()


def test_daemons_that_stand_still_are_killed_and_started_again(machine: Systemd) -> None:
    machine.start()
    before = {unit: machine.restarts(unit) for unit in (TRAINER, PRODUCER)}
    for unit in before:
        machine.signal(unit, "STOP")
    for unit, restarts in before.items():
        machine.wait(lambda u=unit, r=restarts: machine.restarts(u) > r and machine.state(u) == "active")
        machine.wait_for_journal(unit, "Watchdog timeout", "Fatal Python error: Aborted")
    machine.see_it_go_on()


def test_stopping_the_target_drains_and_starting_it_goes_on_with_new_keys(machine: Systemd) -> None:
    machine.start()
    machine.see_it_go_on()
    machine.run("systemctl", "stop", "rl.target")
    for unit in (TRAINER, PRODUCER):
        machine.wait(lambda u=unit: machine.state(u) != "deactivating")
        assert machine.state(unit) == "inactive"
        assert (machine.show(unit, "Result"), machine.show(unit, "ExecMainStatus")) == ("success", "0")
    step = machine.step
    assert machine.path(f"{RUN_DIR}/checkpoints/checkpoint-{step}/pipeline_state.json").is_file()
    machine.give_keys()
    machine.start()
    machine.see_it_go_on()
    machine.wait_for_journal(TRAINER, f"resuming at step {step}")
    # The trainer may go on for some steps with what the journal holds.
    machine.wait(lambda: "connected to the trainer of run" in machine.journal(PRODUCER).rpartition("Stopped ")[2])


def test_a_configuration_that_is_refused_is_not_tried_again(machine: Systemd) -> None:
    machine.path("/etc/slipstream/producer-cpu.env").write_text("RL_ARGS=--set sampling.no_such_key=1\n")
    machine.run("systemctl", "restart", PRODUCER, check=False)
    machine.path("/etc/slipstream/producer-cpu.env").unlink()
    assert machine.state(PRODUCER) == "failed"
    assert machine.show(PRODUCER, "ExecMainStatus") == str(int(ExitCode.CONFIG))
    assert machine.restarts(PRODUCER) == 0
    machine.wait_for_journal(PRODUCER, "no_such_key")


def test_units_in_use_are_not_uninstalled_and_stopped_ones_are(machine: Systemd) -> None:
    machine.run("systemctl", "start", TRAINER)
    refusal = machine.run("make", "-C", "/srv/repository", "uninstall-systemd", check=False)
    assert "systemctl disable --now" in refusal
    machine.run("systemctl", "disable", "--now", "rl.target", TRAINER, PRODUCER)
    machine.run("make", "-C", "/srv/repository", "uninstall-systemd")
    assert machine.show(TRAINER, "LoadState") == "not-found"
    assert machine.path("/etc/slipstream/run.yaml").is_file()
    assert machine.step > 0
