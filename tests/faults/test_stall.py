"""A trainer that stands still, as a machine does that swaps or is suspended, and then goes on.

Its producers notice, keep what they have, and go on with it. `SLIPSTREAM_STALL_S` makes the stall longer.
"""

import os
import signal
import time
from collections.abc import Callable

import pytest

from .memory import memory_bounded
from .run_under_test import HEARTBEAT_TIMEOUT_S, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STALL_S = float(os.environ.get("SLIPSTREAM_STALL_S", str(3 * HEARTBEAT_TIMEOUT_S)))


def test_a_trainer_that_stands_still(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.pace(0.4)
    producers = [run.producer(name) for name in ("left", "right")]
    trainer = run.trainer()
    run.wait_for_step(4)
    for producer in producers:
        producer.wait_for("connected to the trainer of run")
    with memory_bounded(64, *(daemon.process.pid for daemon in (trainer, *producers))):
        trainer.process.send_signal(signal.SIGSTOP)
        stopped = time.time()
        try:
            for producer in producers:
                producer.wait_for(f"the trainer has been silent for {HEARTBEAT_TIMEOUT_S:g} s; waiting for it")
            time.sleep(max(0.0, stopped + STALL_S - time.time()))
            assert not [ack for ack in run.acks if ack.at > stopped + HEARTBEAT_TIMEOUT_S]
        finally:
            trainer.process.send_signal(signal.SIGCONT)
        run.recovers(time.time())
    run.finish(trainer, *producers)
