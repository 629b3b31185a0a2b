"""The files that a run leaves behind, for whoever looks at one: `rl-journal`, `rl-status`, a report.

Guarantee: nothing is changed, and a run that goes on is not held up. A file that is not there has no lines, a line that is still
being written is left out, and so is one that is no JSON object. A number that is not finite is None, which releases wrote as NaN
or as null.
"""

import json
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from protocol.files.rotated_lines import opened, paths, read_end

if TYPE_CHECKING:
    from replay.journal.reader import JournalReader

STEPS, ROLLOUTS, EVALUATIONS, JOURNAL = "steps.jsonl", "rollouts.jsonl", "evaluations.jsonl", "journal.sqlite"
_TIMELINES = "producer-*.jsonl"
_ANNOUNCEMENT_BYTES = 65_536

Line = dict[str, Any]


class DaemonAddress(NamedTuple):
    """Where a daemon answers.

    Args:
        address: HOST:PORT.
        job: `rl-trainer` or `rl-producer`, if it is known before it answers.
        daemon: its name, if it is known.
        process_gone: it ran on this host, and its process is no more.
    """

    address: str
    job: str | None = None
    daemon: str | None = None
    process_gone: bool = False


class RunReader:
    """Reads them.

    Args:
        place: the run's folder, or a journal file.
    """

    def __init__(self, place: Path) -> None:
        self.folder, self._journal = (place.parent, place) if place.is_file() else (place, place / JOURNAL)

    def journal(self) -> "JournalReader":
        """To be closed by the caller.

        Raises:
            JournalError: there is none, or none that this release can read.
        """
        from replay.journal.reader import JournalReader  # SQLite, which not everybody needs

        return JournalReader(self._journal)

    def steps(self) -> list[Line]:
        return _all_lines(self.folder / STEPS)

    def newest_steps(self, num_bytes: int) -> list[Line]:
        """Those in the last `num_bytes`, however long the run is."""
        return _parsed(read_end(self.folder / STEPS, num_bytes))

    def rollouts(self) -> list[Line]:
        """The completions that the trainer has sampled for people."""
        return _all_lines(self.folder / ROLLOUTS)

    def evaluations(self) -> list[Line]:
        return _all_lines(self.folder / EVALUATIONS)

    def timelines(self) -> list[list[Line]]:
        """What each producer did and when."""
        return [_all_lines(path) for path in paths(self.folder, _TIMELINES)]

    def daemons(self) -> Iterator[DaemonAddress]:
        """Those that work, and those that were killed since a daemon of their host last started."""
        for file in sorted((self.folder / "metrics").glob("*.json")):
            try:
                with file.open("rb") as stream:
                    group = json.loads(stream.read(_ANNOUNCEMENT_BYTES))[0]
                labels = group["labels"]
                gone = labels["host"] == socket.gethostname() and not psutil.pid_exists(int(labels["pid"]))
                yield DaemonAddress(str(group["targets"][0]), str(labels["job"]), str(labels["daemon"]), gone)
            except (OSError, ValueError, LookupError, TypeError, OverflowError):
                continue  # it ends just now, or is none of ours


def _all_lines(path: Path) -> list[Line]:
    with opened(path) as files:
        return _parsed(line for file in files for line in file if line.endswith(b"\n"))


def _parsed(lines: Iterable[bytes]) -> list[Line]:
    found = []
    for line in lines:
        try:
            found.append(json.loads(line, parse_constant=lambda constant: None))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]
