"""From the SIGKILL of a rank to the next step that is trained: the second half of `make bench-ranks`.

Guarantee: the command is `rl-trainer` as a user starts it, in fresh processes on the CPU; it is started with `--resume` as soon
as it has ended, as a supervisor without a pause does. Ranks are killed at random instants of a run that trains all the time,
because a scripted producer answers every lease at once. The model is so small that loading it costs nothing beside importing
libraries.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil

from protocol.errors import ExitCode
from tests.integration.models import build_model
from tests.integration.runs import Run

_STEPS_BEFORE = 3  # that a trainer takes before one of its ranks is killed
_KILL_WITHIN_S = 1.0
_LONGEST_S = 300.0
_Found = TypeVar("_Found")


class LostRanks:
    """One run that loses ranks.

    Attributes:
        start_s: from the first start to its first step, with nothing to go on from.
    """

    def __init__(self, folder: Path, world: int, stack: ExitStack) -> None:
        endpoint = {"endpoint": f"ipc://{folder}/control.ipc"}
        self._run = Run(
            folder, build_model("qwen2", folder / "model"), stack, transport=endpoint,
            trainer={"max_steps": 1_000_000, "save_steps": 5}, replay={"max_disk_used": 0.99},
        )  # fmt: skip
        self._stack = stack
        command = [sys.executable, "-m", "consumer.cli", "--gpu", "cpu", "--ranks", str(world), "--resume"]
        self._command = [*command, "--config", str(self._run.config_file)]
        began = time.monotonic()
        self._trainer = self._start()
        self._until_step(1)
        self.start_s = time.monotonic() - began

    def _start(self) -> "subprocess.Popen[bytes]":
        self._seen = self._lines()
        self._run.producer(f"at {time.monotonic()}")
        log = self._stack.enter_context((self._run.folder / "trainer.log").open("ab"))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        trainer = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
        self._stack.callback(trainer.wait)
        self._stack.callback(trainer.kill)
        return trainer

    def _lines(self) -> set[str]:
        return {json.dumps(step) for step in self._run.steps}

    def _until_step(self, count: int) -> None:
        """That this trainer took, whatever its number."""
        self._until(lambda: len(self._lines() - self._seen) >= count)

    def kill(self, draw: random.Random) -> dict[str, float]:
        """Seconds from the kill until the trainer names the rank, has ended, and has taken its next step."""
        self._until_step(_STEPS_BEFORE)
        time.sleep(draw.uniform(0, _KILL_WITHIN_S))
        others = psutil.Process(self._trainer.pid).children()
        victim = draw.choice([child for child in others if "consumer.follower" in child.cmdline()])
        said = len(self._log())
        began = time.monotonic()
        victim.kill()
        self._until(lambda: "ended (killed by SIGKILL)" in self._log()[said:])
        named = time.monotonic()
        code = self._until(self._trainer.poll)
        ended = time.monotonic()
        if code != ExitCode.RANK_LOST:
            raise SystemExit(f"bench-ranks: the trainer ended with {code}:\n{self._log()[-3000:]}")
        self._trainer = self._start()
        self._until_step(1)
        return {"named_s": named - began, "ended_s": ended - began, "step_s": time.monotonic() - began}

    def _until(self, found: Callable[[], _Found]) -> _Found:
        deadline = time.monotonic() + _LONGEST_S
        while not (value := found()):
            if time.monotonic() > deadline:
                raise SystemExit(f"bench-ranks: nothing for {_LONGEST_S:.0f} s:\n{self._log()[-3000:]}")
            time.sleep(0.02)
        return value

    def _log(self) -> str:
        return (self._run.folder / "trainer.log").read_text(errors="replace")


def measure(world: int, kills: int) -> dict[str, Any]:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="bench-lost-rank-") as folder, ExitStack() as stack:
        run = LostRanks(Path(folder), world, stack)
        times = list[dict[str, float]]()
        for number in range(1, kills + 1):
            times.append(run.kill(draw))
            print(number, {name: round(seconds, 2) for name, seconds in times[-1].items()}, flush=True)
    return {
        "world": world,
        "start_s": run.start_s,
        "kills": times,
        **{f"{name}_p50": statistics.median(each[name] for each in times) for name in times[0]},
        **{f"{name}_max": max(each[name] for each in times) for name in times[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/lost_rank.json"), help="JSON file to write")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the trainer (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="one after another (default: %(default)s)")
    options = parser.parse_args()
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": os.getloadavg(),
        **measure(options.ranks, options.kills),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    for name, what in (
        ("named_s", "it is named"),
        ("ended_s", "the trainer has ended"),
        ("step_s", "the next step is trained"),
    ):
        values = (report[f"{name}_p50"], report[f"{name}_max"])
        print(f"after a rank's SIGKILL {what} in {values[0]:.1f} s in the median, {values[1]:.1f} s at most")
    print(f"the first start took {report['start_s']:.1f} s to its first step")


if __name__ == "__main__":
    main()
