"""`rl-producer` as a process: what it refuses and how it ends, by exit code, message, and what is left behind.

Three daemons with real vLLM, started together, one of which spawns its engine core as on a CPU; the others fork it, as beside a
GPU. Where vLLM has no part in it, a stand-in.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from protocol.channel.server import ZmqServer
from protocol.wire.handshake import TrainerNeeds, problems
from protocol.wire.messages import Bye, Group, Heartbeat, Hello, Nack, PolicyInfo
from tests.integration.models import build_model, random_adapter
from tests.integration.pair import START_S, Daemon, gone
from tests.scripted import facts
from tests.scripted_trainer import ScriptedTrainer, lease

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

REWARDS = """
import math, os, time

def moody(completions, mood, **_):
    match mood[0]:
        case "raises":
            raise ValueError("no digits")
        case "hangs":
            time.sleep(600)
        case "nan":
            return [math.nan, 1.0, 2.0, 3.0]
        case path if path.startswith("/"):
            while not os.path.exists(path):
                time.sleep(0.02)
    return [0.0, 1.0, 2.0, 3.0]
"""
ENGINELESS = "tests.integration.engineless_producer"
SPAWNING = "interrupted"
TIMEOUT_S = 6.0  # of rewards; a busy machine takes less for one that does nothing


class Run:
    """A folder with one small model and reward file, and any number of configurations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = build_model("qwen2", folder / "model")
        (folder / "rewards.py").write_text(REWARDS)
        self.blob, digest = random_adapter(self.model, folder / "adapter")
        self.policy = PolicyInfo(0, digest, len(self.blob))

    def config(self, name: str, **sections: Any) -> Path:
        values = {
            "run_dir": str(self.folder / name),
            "model": {"path": str(self.model), "dtype": "float32"},
            "dataset": {"path": "unused"},
            "rewards": {
                "functions": [{"function": f"{self.folder}/rewards.py:moody"}],
                "num_workers": 1,
                "timeout_s": TIMEOUT_S,
            },
            "sampling": {"num_generations": 4, "max_completion_length": 8},
            "transport": {"heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 5.0},
            "lora": {"r": 8, "lora_alpha": 16},
            "engine": {
                "max_model_len": 128,
                "max_num_seqs": 16,
                "enforce_eager": True,
                "num_gpu_blocks_override": 64,  # vLLM would take a gigabyte of memory each
            },
        }
        (self.folder / name).mkdir(exist_ok=True)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values | sections))
        return path

    def start(self, name: str, module: str = "producer.app.cli", **sections: Any) -> Daemon:
        log, config = self.folder / f"{name}.log", self.config(name, **sections)
        return Daemon(module, log, "--config", str(config), spawns=name == SPAWNING)

    def endpoints(self, name: str) -> tuple[str, str]:
        return f"ipc://{self.folder}/{name}/control.ipc", f"ipc://{self.folder}/{name}/control.ipc.blobs"

    @contextmanager
    def trainer(self, name: str, **switches: Any) -> Iterator[ScriptedTrainer]:
        server = ZmqServer(*self.endpoints(name), 2**26)
        trainer = ScriptedTrainer(server, self.policy)
        trainer.blobs[self.policy.digest] = self.blob
        for switch, value in switches.items():
            setattr(trainer, switch, value)
        trainer.start()
        try:
            yield trainer
        finally:
            trainer.stop()
            server.close()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="sl-", dir="/tmp") as folder:  # short, for the sockets
        yield Run(Path(folder))


def refuse(run: Run, name: str, arguments: tuple[str, ...] = (), **sections: Any) -> tuple[int, str]:
    """Exit code and messages of a start that must fail."""
    daemon = Daemon(
        "producer.app.cli", run.folder / f"{name}.log", "--config", str(run.config(name, **sections)), *arguments
    )
    return daemon.end(START_S), daemon.output


# Refused before vLLM is imported.


def test_a_reward_function_is_refused_before_the_engine_is_loaded(run):
    function = "math:rewrad"
    code, output = refuse(run, "reward-name", rewards={"functions": [{"function": function}], "num_workers": 1})
    assert code == 78
    assert f"rl-producer: error: rewards.functions: {function}: math has no `rewrad`" in output
    assert "loading the engine" not in output
    assert "Traceback" not in output


# Refused by vLLM, or before it is asked.


def test_what_vllm_refuses_ends_a_check_and_a_start_before_weights_are_loaded(run):
    too_long = {"engine": {"max_model_len": 1024}}
    said_of_it = "User-specified max_model_len (1024) is greater than the derived max_model_len"
    unknown = {"engine": {"max_modle_len": 64}}
    starts: list[tuple[str, tuple[str, ...], dict[str, Any], str]] = [
        ("check", ("--check",), too_long, "engine.max_model_len: 1024 is more than the"),
        ("start", (), too_long, said_of_it),
        ("unknown", (), unknown, "unknown to vllm.AsyncEngineArgs; did you mean `max_model_len`?"),
        ("no-model", (), {"model": {"path": "/no/model/here"}}, "/no/model/here"),
    ]
    for name, arguments, sections, said in starts:
        code, output = refuse(run, name, arguments, **sections)
        assert code == 78, (name, output[-2000:])
        assert said in output, (name, output[-2000:])
        assert "rl-producer: error: " in output
        assert "Traceback" not in output
        assert "Loading safetensors" not in output


# How it ends, around the engine.


def test_a_trainer_that_refuses_ends_it_with_every_problem(run):
    needs = TrainerNeeds("a" * 64, "b" * 64, "bfloat16", 128, 80, 2048, ("other",))
    found = problems(needs, facts())
    assert len(found) == 7
    with run.trainer("rejected", problems=found):
        daemon = run.start("rejected", ENGINELESS)
        assert daemon.end() == 76, daemon.output
    assert "rl-producer: error: the trainer refused this producer:" in daemon.output
    for problem in found:
        assert f"\n  {problem}" in daemon.output
    assert "Traceback" not in daemon.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_finalizer_ends_a_producer_that_starts(run, number):
    daemon = run.start(f"finalizing-{number}", "tests.integration.finalizing_producer")
    daemon.wait_for("in a finalizer")
    family = daemon.family()
    assert len(family) == 3, "the daemon, one reward worker and its keeper"
    daemon.process.send_signal(number)
    assert daemon.end() == 0, daemon.output
    assert "dropped" not in daemon.output
    assert gone(family)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_waits_for_the_trainer_ends_it(run, number):
    daemon = run.start(f"waits-{number}", ENGINELESS)
    daemon.wait_for("waiting for the trainer at ipc://")
    family = daemon.family()
    assert len(family) == 3, "the daemon, one reward worker and its keeper"
    daemon.process.send_signal(number)
    assert daemon.end() == 0, daemon.output
    assert gone(family)


def test_what_it_holds_survives_its_trainer_but_not_the_run(run):
    functions = [{"function": f"{run.folder}/rewards.py:moody"}]
    sections = {
        "transport": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 3.0},
        "rewards": {"functions": functions, "num_workers": 2, "timeout_s": 60.0},
    }
    gate = run.folder / "gate"
    with closing(run.start("restarts", ENGINELESS, **sections)) as daemon:
        with run.trainer("restarts", acknowledges=False) as trainer:
            trainer.give(moody(1, "fine"), moody(2, str(gate)), moody(3, "fine", policy_floor=5))
            assert isinstance(answer_to(trainer, 1), Group)
            trainer.wait_for(lambda: where(trainer) == (1, 0, 1, 1))
        daemon.wait_for("waiting for it at ipc://")
        with run.trainer("restarts", session="session-2", outcome="duplicate") as trainer:
            assert trainer.wait_for_message(Hello)[0].held == ["lease-2", "lease-3", "lease-1"]
            assert isinstance(answer_to(trainer, 1), Group)
            assert answer_to(trainer, 3) == Nack("lease-3", "returned")
            trainer.wait_for(lambda: where(trainer) == (0, 0, 1, 0))
            trainer.acknowledges = False
            gate.touch()
            assert isinstance(answer_to(trainer, 2), Group)
            assert [group.lease_id for group in trainer.all(Group)] == ["lease-1", "lease-2"]
        with run.trainer("restarts", session="session-3", run_id="run-2") as trainer:
            trainer.give(moody(4, "fine"))
            assert isinstance(answer_to(trainer, 4), Group)
            trainer.wait_for(lambda: where(trainer) == (0, 0, 0, 0))
            assert [group.lease_id for group in trainer.all(Group)] == ["lease-4"]
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.end() == 0, daemon.output
        assert daemon.output.count("another process of the same run: 3 leases go on") == 1
        assert daemon.output.count("the trainer of another run: 1 leases of run run are void") == 1
        assert "not acknowledged" not in daemon.output


# How it ends with a real engine.

FLEET = ("rewards", "stopped", SPAWNING)


@pytest.fixture(scope="module")
def fleet(run: Run) -> Iterator[dict[str, Daemon]]:
    functions = [{"function": f"{run.folder}/rewards.py:moody"}]
    patient = {"rewards": {"functions": functions, "num_workers": 1, "timeout_s": 600.0}}
    daemons = {name: run.start(name, **(patient if name == "stopped" else {})) for name in FLEET}
    yield daemons
    for daemon in daemons.values():
        daemon.close()


def family_of(daemon: Daemon) -> list[psutil.Process]:
    """The daemon and its children, once it is ready."""
    daemon.wait_for("waiting for the trainer at ipc://", 240)
    family = daemon.family()
    assert engine_core(family).is_running()
    assert [each for each in family if "producer.rewards.worker" in " ".join(each.cmdline())]
    return family


def engine_core(family: list[psutil.Process]) -> psutil.Process:
    """A fork keeps the command line."""
    daemon, *children = [(each, each.cmdline()) for each in family]
    (core,) = [each for each, command in children if "EngineCore" in " ".join(command) or command == daemon[1]]
    return core


def moody(number: int, mood: str, **changes: Any):
    return lease(number, columns={"mood": mood}, **changes)


def where(trainer: ScriptedTrainer) -> tuple[int, int, int, int] | None:
    """Where the leases are, as last reported: waiting, generating, scoring, unacked."""
    beats = trainer.all(Heartbeat)
    return (beats[-1].waiting, beats[-1].generating, beats[-1].scoring, beats[-1].unacked) if beats else None


def answer_to(trainer: ScriptedTrainer, number: int) -> Group | Nack:
    def answers() -> list[Group | Nack]:
        found: list[Group | Nack] = [*trainer.all(Group), *trainer.all(Nack)]
        return [each for each in found if each.lease_id == f"lease-{number}"]

    trainer.wait_for(answers, 60)
    return answers()[0]


def test_every_reward_comes_back_typed_and_an_engine_that_dies_idle_ends_it(run, fleet):
    daemon = fleet["rewards"]
    family_of(daemon)
    with run.trainer("rewards") as trainer:
        moods = enumerate(["fine", "raises", "hangs", "nan"])
        trainer.give(*(moody(number, mood) for number, mood in moods), moody(4, "fine", prompt="1" * 125))
        for number, rewards in {0: [0, 1, 2, 3], 3: [np.nan, 1, 2, 3]}.items():
            group = answer_to(trainer, number)
            assert isinstance(group, Group), group
            np.testing.assert_array_equal(np.frombuffer(group.rewards, "<f4"), np.array(rewards, "<f4"))
            assert group.policy_version == 0
            assert np.frombuffer(group.completion_lengths, "<i4").sum() * 4 == len(group.logprobs)
        for number, reason, said in [
            (1, "reward_failed", "rewards.py:moody raised\n"),
            (1, "reward_failed", "ValueError: no digits"),
            (2, "reward_failed", "did not return within 6 seconds and its worker was killed"),
            (4, "prompt_too_long", ""),
        ]:
            nack = answer_to(trainer, number)
            assert isinstance(nack, Nack)
            assert nack.reason == reason
            assert said in nack.detail

        trainer.wait_for(lambda: trainer.all(Heartbeat)[-1].held == [])
        family = daemon.family()  # the worker that hung was replaced
        engine_core(family).kill()
        assert daemon.end() == 69, daemon.output[-3000:]
        trainer.wait_for_message(Bye)
    assert "rl-producer: error: the engine core has ended" in daemon.output
    assert gone(family)


def test_sigterm_hands_open_leases_back(run, fleet):
    daemon = fleet["stopped"]
    family = family_of(daemon)
    with run.trainer("stopped") as trainer:
        trainer.give(moody(1, "fine"))
        assert isinstance(answer_to(trainer, 1), Group)
        trainer.give(moody(2, "hangs"), moody(3, "fine", policy_floor=5))
        trainer.wait_for(lambda: trainer.all(Heartbeat)[-1].held == ["lease-2", "lease-3"])
        daemon.process.send_signal(signal.SIGTERM)
        trainer.wait_for_message(Bye)
        handed_back = [each for each in trainer.received if isinstance(each, Nack | Bye)]
        assert handed_back[-1] == Bye("stopping")
        assert {each.lease_id for each in handed_back[:-1]} == {"lease-2", "lease-3"}
        assert {each.reason for each in handed_back[:-1]} == {"returned"}
    assert daemon.end() == 0, daemon.output[-3000:]
    assert "SIGTERM: handing leases back and stopping" in daemon.output
    assert "error" not in daemon.output.split("SIGTERM")[1].lower()
    assert gone(family)


def test_a_second_interrupt_ends_it_at_once(run, fleet):
    """Both as a terminal sends them: to every process of the group."""
    daemon = fleet["interrupted"]
    family = family_of(daemon)
    with run.trainer("interrupted", acknowledges=False) as trainer:
        trainer.give(moody(1, "fine"))
        answer_to(trainer, 1)
        os.killpg(daemon.process.pid, signal.SIGINT)
        daemon.wait_for("SIGINT: handing leases back and stopping")
        assert daemon.process.poll() is None, "it waits for the group to be acknowledged"
        os.killpg(daemon.process.pid, signal.SIGINT)
        assert daemon.end() == 130, daemon.output[-3000:]
    assert gone(family)
