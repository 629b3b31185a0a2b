"""A trainer whose ranks are on two hosts, which here are two commands on one."""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.unit.protocol.channel_harness import reserve_port

from .pair import Daemon
from .runs import Run
from .test_ranks import other_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture
def rendezvous(stack: ExitStack) -> str:
    return f"127.0.0.1:{reserve_port(stack)}"


def host(run: Run, number: int, rendezvous: str, *arguments: str, spawns: bool = False) -> Daemon:
    nodes = ("--nodes", "2", "--node-rank", str(number), "--rendezvous", rendezvous)
    log = run.folder / f"host-{number}.log"
    arguments = ("--config", str(run.config_file), "--resume", *nodes, *arguments)
    process = Daemon("consumer.app.cli", log, *arguments, spawns=spawns)
    run.stack.callback(process.kill)
    return process


def test_two_hosts_train_together_and_end_together(start: Callable[..., Run], rendezvous: str) -> None:
    run = start(trainer={"max_steps": 500})
    run.producer("first")
    hosts = [host(run, number, rendezvous, "--ranks", str(number + 1)) for number in (1, 0)]  # the trainer comes last
    run.wait_for_step(3)
    assert [len(other_ranks(each.process.pid)) for each in hosts] == [2, 0]
    assert "ranks 1 to 2 of 3 begin here" in hosts[0].output
    other_ranks(hosts[0].process.pid)[1].send_signal(signal.SIGKILL)
    assert [each.end() for each in hosts] == [77, 77], [each.output for each in hosts]
    assert "rank 2 ended (killed by SIGKILL)" in hosts[1].output

    total = run.steps[-1]["step"] + 2
    run.producer("second")
    hosts = [host(run, number, rendezvous, "--set", f"trainer.max_steps={total}") for number in (0, 1)]
    assert [each.end() for each in hosts] == [0, 0], [each.output for each in hosts]
    assert run.column("step") == list(range(1, total + 1))


def test_hosts_that_differ_are_refused_on_both(start: Callable[..., Run], rendezvous: str) -> None:
    run = start()
    hosts = [host(run, 0, rendezvous), host(run, 1, rendezvous, "--set", "trainer.learning_rate=1e-5")]
    assert [each.end() for each in hosts] == [78, 78], [each.output for each in hosts]
    for each in hosts:
        assert "node 1 differs from node 0 in trainer; all need the same configuration" in each.output


def test_a_host_ends_when_the_trainer_is_killed_and_the_trainer_stops_while_it_waits(
    start: Callable[..., Run], rendezvous: str
) -> None:
    run = start(trainer={"max_steps": 500})
    run.producer()
    trainer, other = host(run, 0, rendezvous), host(run, 1, rendezvous)
    run.wait_for_step(1)
    trainer.kill()
    assert other.end() == 77
    trainer = host(run, 0, rendezvous)
    trainer.wait_for("resuming at|journal:")
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.end() == 0, trainer.output


def test_a_host_that_is_gone_before_its_ranks_gave_a_sign_of_life_is_named(
    start: Callable[..., Run], rendezvous: str
) -> None:
    run = start(pipeline={"rank_silence_s": 6})
    trainer, other = host(run, 0, rendezvous), host(run, 1, rendezvous, spawns=True)
    other.wait_for("ranks 1 to 1 of 2 begin here")  # and import their libraries, which takes some seconds
    other.kill()
    began = time.monotonic()
    assert trainer.end() == 77
    assert time.monotonic() - began < 30  # 9 on a machine that is not busy
    assert "node 1 (ranks 1 to 1) gave no sign of life for 6 s: it is stopped, or its host is gone" in trainer.output
