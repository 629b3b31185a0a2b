"""The arms of `benchmarks.overlap`, one at a time: run it, and read what it left behind.

Guarantee: a step's times are the daemons' own (`steps.jsonl`), the engine's are those of the groups in the journal.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.overlap_pair import CONFIG, pinned, run_pair
from benchmarks.overlap_report import Interval, Step
from protocol.runtime import json_lines as rotated_lines
from replay.journal.reader import JournalReader
from slipstream.journal.content import ContentReader


@dataclass(frozen=True)
class Arm:
    """What was measured; `generating` has one interval per group, in Unix time."""

    steps: list[Step]
    adapter: Path
    generating: list[Interval] | None = None
    lengths: list[int] | None = None  # of completions


def pair(run_dir: Path, settings: Sequence[str], *, max_staleness: int) -> Arm:
    run_pair(run_dir, [*settings, f"pipeline.max_staleness={max_staleness}"])
    generating, lengths = _groups(run_dir / "journal.sqlite")
    return Arm(_steps(run_dir), run_dir / "adapter", generating, lengths)


def trl(run_dir: Path, settings: Sequence[str]) -> Arm:
    run_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.overlap_trl", CONFIG, str(run_dir), *settings]
    with (run_dir / "trl.log").open("wb") as log:
        subprocess.run(command, env=pinned(range(2)), stdout=log, stderr=subprocess.STDOUT, check=True)
    return Arm(_steps(run_dir), run_dir / "adapter")


def _steps(run_dir: Path) -> list[Step]:
    lines = rotated_lines.read(run_dir / "steps.jsonl")
    return [Step(line["t"], line["reward"], line.get("wait_s", 0.0), line.get("step_s", 0.0)) for line in lines]


def _groups(journal: Path) -> tuple[list[Interval], list[int]]:
    generating, lengths = [], []
    with closing(JournalReader(journal)) as reader:
        contents = ContentReader(reader)
        for row in list(reader.rows()):
            content = contents.read(row)
            assert content is not None
            ended = row.accepted_at - content.message.reward_s
            generating.append((ended - content.message.generation_s, ended))
            lengths += content.group.completion_lengths.tolist()
    return generating, lengths
