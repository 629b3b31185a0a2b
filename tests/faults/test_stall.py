"""A trainer that stands still, as a machine does that swaps or is suspended, and then goes on.

Its producers notice, keep what they have, and go on with it. `SLIPSTREAM_STALL_S` makes the stall longer.
"""

import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from .run_under_test import HEARTBEAT_TIMEOUT_S, RECOVERY_S, Memory, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEPS = 60
STALL_S = float(os.environ.get("SLIPSTREAM_STALL_S", str(3 * HEARTBEAT_TIMEOUT_S)))
BOUND_MB = 64


def test_a_trainer_that_stands_still(tmp_path: Path, short_dir: Path, model: Path) -> None:
    with ExitStack() as stack:
        run = Run(stack, tmp_path, model, f"ipc://{short_dir}/c", trainer={"max_steps": STEPS})
        run.pace(0.4)
        producers = [run.producer(name) for name in ("left", "right")]
        trainer = run.trainer()
        run.wait_for_step(4)
        for producer in producers:
            producer.wait_for("connected to the trainer of run")
        with Memory(trainer, *producers) as memory:
            trainer.process.send_signal(signal.SIGSTOP)
            stopped = time.time()
            try:
                for producer in producers:
                    producer.wait_for(f"the trainer has been silent for {HEARTBEAT_TIMEOUT_S:g} s; waiting for it")
                time.sleep(max(0.0, stopped + STALL_S - time.time()))
                assert not [ack for ack in run.acks if ack.at > stopped + 0.5]
            finally:
                trainer.process.send_signal(signal.SIGCONT)
            recovered = run.recovery_s(time.time())
        print(f"stalled {STALL_S:g} s, recovered within {recovered:.2f} s; memory grew by {memory.growth_mb:.1f} MB")
        assert recovered < RECOVERY_S
        assert memory.growth_mb < BOUND_MB
        run.pace(0.0)
        assert trainer.end() == 0
        for producer in producers:
            assert producer.end() == 0
            assert len(re.findall("waiting for it", producer.output)) >= 1
        assert run.step == STEPS
        run.check(STEPS)
