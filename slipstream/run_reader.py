"""Reads the files that a run leaves behind, for `slipstream journal`, `slipstream status` and reports.

Guarantee: it changes nothing and never delays a run that goes on. A file that does not exist has no lines. A line that is still
being written is left out, and so is a line that is no JSON object. A number that is not finite is None.
"""

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from protocol.runtime.json_lines import opened, paths, read_end

if TYPE_CHECKING:
    from replay.journal.reader import JournalReader

STEPS, ROLLOUTS, EVALUATIONS, JOURNAL = "steps.jsonl", "rollouts.jsonl", "evaluations.jsonl", "journal.sqlite"
_TIMELINES = "producer-*.jsonl"
_SUMMARY = "trainer.json"
_ANNOUNCEMENT_BYTES = 65_536
_LAST_LINES_BYTES = 256 * 1024  # more than the longest line of a step

Line = dict[str, Any]


class DaemonAddress(NamedTuple):
    address: str  # HOST:PORT
    job: str | None = None  # `rl-trainer` or `rl-producer`, if it is known before it answers
    daemon: str | None = None  # its name, if it is known
    process_gone: bool = False  # it ran on this host


class Ended(NamedTuple):
    """The end of a run by its own trainer."""

    step: int  # the last one that was taken
    finished: bool  # otherwise it was stopped, and `--resume` goes on
    at: float  # Unix time
    dead_rewards: Mapping[str, int] = MappingProxyType({})  # groups by reward, of rewards that scored none

    @property
    def text(self) -> str:
        return f"{'finished' if self.finished else 'stopped'} at step {self.step}"


class RunReader:
    """Read the files of one run, whose folder or journal file is `place`."""

    def __init__(self, place: Path) -> None:
        self.folder, self._journal = (place.parent, place) if place.is_file() else (place, place / JOURNAL)

    def is_run(self) -> bool:
        """Return whether a daemon has worked there, or the journal of a run is there, as in a copy."""
        return (self.folder / "metrics").is_dir() or self._journal.exists()

    def journal(self) -> "JournalReader":
        """The run's journal, which the caller closes; `JournalError` if there is none that can be read."""
        from replay.journal.reader import JournalReader  # imports SQLite, which few callers need

        return JournalReader(self._journal)

    def lines(self, name: str) -> list[Line]:
        """Return the lines of `STEPS`, `ROLLOUTS` or `EVALUATIONS`, or of a producer's timeline."""
        with opened(self.folder / name) as files:
            return parsed_lines(line for file in files for line in file)

    def newest_steps(self, num_bytes: int) -> list[Line]:
        """The steps in the last `num_bytes` of the file; a long run takes no longer."""
        return self.newest_lines(STEPS, num_bytes)

    def newest_lines(self, name: str, num_bytes: int) -> list[Line]:
        """Return the lines in the last `num_bytes` of the file."""
        return parsed_lines(read_end(self.folder / name, num_bytes))

    def timeline_names(self) -> list[str]:
        """The files of the producers' timelines, by name."""
        return [path.name for path in paths(self.folder, _TIMELINES)]

    def timelines(self) -> list[list[Line]]:
        return [self.lines(name) for name in self.timeline_names()]

    def ended(self) -> Ended | None:
        """Return how the run's trainer ended; None if it has not, was killed, or has taken steps since."""
        try:
            with (self.folder / _SUMMARY).open("rb") as file:
                said, at = json.load(file), os.fstat(file.fileno()).st_mtime
            dead = {str(name): int(count) for name, count in said.get("dead_rewards", {}).items()}
            found = Ended(int(said["steps"]), said["finished"] is True, at, dead)
            steps = self.newest_steps(_LAST_LINES_BYTES)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        newest = max((line["step"] for line in steps if isinstance(line.get("step"), int)), default=0)
        return None if newest > found.step else found

    def daemons(self) -> Iterator[DaemonAddress]:
        """Yield the daemons that are running, and those that were killed and left their files."""
        for file in sorted((self.folder / "metrics").glob("*.json")):
            try:
                with file.open("rb") as stream:
                    group = json.loads(stream.read(_ANNOUNCEMENT_BYTES))[0]
                labels = group["labels"]
                gone = labels["host"] == socket.gethostname() and not psutil.pid_exists(int(labels["pid"]))
                yield DaemonAddress(str(group["targets"][0]), str(labels["job"]), str(labels["daemon"]), gone)
            except (OSError, ValueError, LookupError, TypeError, OverflowError):
                continue  # its daemon is ending, or the file is none of ours


def is_name_of_a_run(name: str) -> bool:
    """Return whether a daemon writes JSON lines into the run's folder under this name."""
    path = Path(name)
    newer = path.stem.removesuffix(".1") + path.suffix
    return newer in (STEPS, ROLLOUTS, EVALUATIONS) or Path(newer).match(_TIMELINES)


def parsed_lines(lines: Iterable[bytes]) -> list[Line]:
    """The lines that are JSON objects; see the guarantee of the module."""
    found = []
    for line in lines:
        try:
            found.append(json.loads(line, parse_constant=lambda constant: None))
        except (ValueError, RecursionError):
            continue
    return [line for line in found if isinstance(line, dict)]
