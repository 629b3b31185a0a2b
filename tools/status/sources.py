"""Where the daemons of a run answer: what they wrote into `RUN_DIR/metrics`, or addresses given by hand.

Guarantee: a file that is not there any more, or that is being replaced, costs one source and no error; an address comes once.
"""

import json
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_FILE_BYTES = 65_536


@dataclass(frozen=True)
class Source:
    """An address to ask.

    Args:
        address: HOST:PORT.
        job: `rl-trainer` or `rl-producer`, as far as it is known before it answers.
        daemon: its name, as far as it is known.
        process_gone: it ran on this host, and its process is no more.
    """

    address: str
    job: str | None = None
    daemon: str | None = None
    process_gone: bool = False


def find_sources(run_dir: Path | None, addresses: Iterable[str]) -> list[Source]:
    """Trainer first, then producers by name, then what was given by hand."""
    announced = sorted(_announced(run_dir), key=lambda source: (source.job != "rl-trainer", source.daemon or ""))
    known = {source.address for source in announced if not source.process_gone}
    return announced + [Source(address) for address in dict.fromkeys(addresses) if address not in known]


def _announced(run_dir: Path | None) -> Iterator[Source]:
    for file in sorted((run_dir / "metrics").glob("*.json")) if run_dir else []:
        try:
            with file.open("rb") as stream:
                group = json.loads(stream.read(_FILE_BYTES))[0]
            labels = group["labels"]
            gone = labels["host"] == socket.gethostname() and not psutil.pid_exists(int(labels["pid"]))
            yield Source(str(group["targets"][0]), str(labels["job"]), str(labels["daemon"]), gone)
        except (OSError, ValueError, LookupError, TypeError, OverflowError):
            continue
