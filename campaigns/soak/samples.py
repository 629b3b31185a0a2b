"""What is measured of daemons and of folders, and how.

Guarantee: a sample of a daemon counts it and all its descendants; one that ends meanwhile gives no sample, never half of one.
Only what belongs to the daemon asked for is counted: of shared memory the folders that it holds open, as every daemon does of
its own.
"""

import contextlib
import json
import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from protocol.runtime import json_lines as rotated_lines
from protocol.runtime.processes import descendants
from protocol.runtime.scratch import PREFIX

SHARED_MEMORY = Path("/dev/shm")
MEMORY = "rss_bytes"
GROUPS = "groups"
_COUNTERS = ("rl_trainer_groups_received", "rl_producer_groups_generated")
_SCRAPE_S = 5.0


@dataclass
class Lifetime:
    """The samples of one process, or of a folder, from its start to its end."""

    name: str
    started_at: float
    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)  # scratch, that it ever held

    def add(self, at_s: float, values: Mapping[str, float]) -> None:
        self.at_s.append(at_s)
        for kind, value in values.items():
            self.values.setdefault(kind, []).append(value)


def of_process(pid: int) -> dict[str, float] | None:
    """Of it and its descendants; None if it has ended."""
    try:
        daemon = psutil.Process(pid)
        if daemon.status() == psutil.STATUS_ZOMBIE:
            return None
        counts = [_count(daemon), *map(_count_if_there, descendants(pid)[1:])]
    except psutil.Error:
        return None
    memory, descriptors, threads = (float(sum(column)) for column in zip(*counts, strict=True))
    return {
        MEMORY: memory,
        "descriptors": descriptors,
        "threads": threads,
        "processes": float(len(counts)),
        "files_in_shared_memory": float(
            sum(num_files(folder) for folder in scratch_of(pid) if folder.parent == SHARED_MEMORY)
        ),
    }


def _count(process: psutil.Process) -> tuple[int, int, int]:
    with process.oneshot():
        return process.memory_info().rss, process.num_fds(), process.num_threads()


def _count_if_there(pid: int) -> tuple[int, int, int]:
    try:
        return _count(psutil.Process(pid))
    except psutil.Error:
        return 0, 0, 0


def scratch_of(pid: int) -> set[Path]:
    """The scratch folders that this process holds open, as the owner of one does."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                place = Path(os.readlink(descriptor.path))
                if place.name.startswith(PREFIX):
                    found.add(place)
    return found


def of_run(run_dir: Path) -> dict[str, float]:
    """Of its folder. Every producer leaves a timeline and a log, so these are counted apart."""
    sizes: dict[Path, int] = {}
    for folder, _, names in os.walk(run_dir):
        for name in names:
            with contextlib.suppress(OSError):
                sizes[Path(folder, name)] = os.stat(Path(folder, name)).st_size
    left = [file for file in sizes if file.parent == run_dir and file.match("producer-*")]
    timelines = [file for file in left if file.suffix == ".jsonl"]
    return {
        "files": float(len(sizes) - len(left)),
        "timelines": float(len(timelines)),
        "run_dir_bytes": float(sum(sizes.values())),
        "journal_bytes": float(sum(size for file, size in sizes.items() if file.name.startswith("journal.sqlite"))),
    }


def done_in(run_dir: Path) -> dict[str, int]:
    """Steps and evaluations of the run."""
    files = {f"steps of {run_dir.name}": run_dir / "steps.jsonl", "evaluations": run_dir / "evaluations.jsonl"}
    return {what: len(rotated_lines.read(file)) for what, file in files.items()}


def num_files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def groups_by_process(run_dir: Path) -> dict[int, float]:
    """How many groups each daemon of the run has seen, as its metrics say; it is missing where the daemon does not answer."""
    found = {}
    for file in (run_dir / "metrics").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            [target] = json.loads(file.read_text())
            with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=_SCRAPE_S) as answer:
                found[int(target["labels"]["pid"])] = _num_groups(answer.read().decode())
    return found


def _num_groups(text: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        if family.name in _COUNTERS
        for sample in family.samples
    )


def processes_with(folder: Path) -> list[psutil.Process]:
    """Whose place for temporary files is this folder: all that the run's daemons started, also what they have lost."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
