"""The real `rl-trainer` trains to its end while strangers of every kind are at its endpoints."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from campaigns.fuzz.strangers import Report, strangers_at
from tests.unit.protocol.channel_harness import reserve_port

from .runs import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_a_run_finishes_among_strangers(tmp_path: Path, trained_model: Path) -> None:
    with ExitStack() as stack:
        endpoints = [f"tcp://127.0.0.1:{reserve_port(stack)}" for _ in range(2)]
        transport = {
            "endpoint": endpoints[0],
            "blob_endpoint": endpoints[1],
            "heartbeat_interval_s": 5.0,  # strangers hold heartbeats up, which costs no lease
            "heartbeat_timeout_s": 30.0,
        }
        run = Run(tmp_path, trained_model, stack, transport=transport, trainer={"max_steps": 10})
        trainer = run.trainer()
        report = Report("the trainer")
        trainer.wait_for("waiting for producers")
        with strangers_at(endpoints, None, 1, (), report):
            producer = run.producer()
            assert trainer.end(120.0) == 0
        producer.join(10.0)
        print(report.summary)
    assert producer.farewell == "finished"
    assert run.column("step") == list(range(1, 11))
    assert {ack.outcome for ack in producer.acks} <= {"accepted", "stale"}
    assert report.connections.total() > 0
