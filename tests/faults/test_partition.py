"""A network that goes away between a real trainer and a real producer, over tcp and with keys.

Both notice, hold what they have, and go on by themselves when it is back; nothing is lost. `SLIPSTREAM_PARTITION_S`
keeps it away for longer.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.channel.keys import AUTHORIZED, generate

from .memory import memory_bounded
from .namespace import network_namespace
from .run_under_test import HEARTBEAT_TIMEOUT_S, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PARTITION_S = float(os.environ.get("SLIPSTREAM_PARTITION_S", str(3 * HEARTBEAT_TIMEOUT_S)))


def test_a_partition(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    keys = tmp_path / "keys"
    for name in ("trainer", "gpu01"):
        generate(keys, name)
    shutil.copy(keys / "gpu01.public", keys / AUTHORIZED)
    with network_namespace() as network:
        transport = {"endpoint": "tcp://127.0.0.1:5557", "keys": str(keys), "identity": "gpu01"}
        run = make_run(transport, network=network.path)
        run.pace(0.4)
        producer = run.producer()
        trainer = run.trainer()
        run.wait_for_step(4)
        with memory_bounded(64, trainer.process.pid, producer.process.pid):
            network.link("down")
            down = time.time()
            producer.wait_for(f"the trainer has been silent for {HEARTBEAT_TIMEOUT_S:g} s; waiting for it")
            trainer.wait_for(r"producer gpu01-\S+ left \((silent for|it cannot be)", 10)
            time.sleep(max(0.0, down + PARTITION_S - time.time()))
            assert not [ack for ack in run.acks if ack.at > down + HEARTBEAT_TIMEOUT_S], "the network was not away"
            network.link("up")
            run.recovers(time.time())
        run.finish(trainer, producer)
    secrets = [file.read_bytes().split()[2] for file in keys.glob("*.secret")]
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".secret"]
    assert len(secrets) == 2
    assert not [file for file in written if any(secret in file.read_bytes() for secret in secrets)]
