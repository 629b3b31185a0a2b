"""A trainer's door in a process of its own: server, intake, buffer and journal, without a model.

`python -m tests.faults.door FOLDER CONTROL BLOB MAX_MESSAGE_BYTES [KEYS]` answers every line on standard input with one of
JSON, and ends with the input. It may open `DESCRIPTORS` files. The line `stop authenticator` does that first.
"""

import json
import logging
import resource
import sys
import threading
from pathlib import Path

from benchmarks.acceptor import Acceptor
from protocol.channel.keys import trainer_keys
from protocol.channel.server import ZmqServer

DESCRIPTORS = 1024  # so that a flood is small; a trainer takes all that its host allows
_HEARTBEAT_S = (10.0, 60.0)  # a flood on a busy machine holds up heartbeats, and costs no lease for that


def main(folder: str, control: str, blob: str, max_message_bytes: str, keys: str | None = None) -> None:
    logging.basicConfig(level=logging.INFO)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    server = ZmqServer(control, blob, int(max_message_bytes), trainer_keys(Path(keys)) if keys else None)
    with Acceptor(server, Path(folder), heartbeat_s=_HEARTBEAT_S) as acceptor:
        print("open", flush=True)
        for line in sys.stdin:
            if line == "stop authenticator\n":
                server._authenticator.stop()
            threads = sorted(thread.name for thread in threading.enumerate())
            seen = {"refusals": server.refusals.counts, "counts": acceptor.buffer.totals, "threads": threads}
            print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
