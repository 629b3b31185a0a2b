"""The pair of `benchmarks.overlap`: producer on one core, trainer on another.

Guarantee: every thread and child process of a daemon stays on the core of that daemon.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

CONFIG = "benchmarks/overlap.yaml"
PRODUCER_CORE, TRAINER_CORE = 0, 1
_STOP_TIMEOUT_S = 60.0


def run_pair(run_dir: Path, settings: Sequence[str]) -> None:
    """Trains to the end. The daemons' messages go to files in `run_dir`.

    Args:
        settings: overrides of `CONFIG`, as `section.key=value`.
    """
    run_dir.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="overlap-") as sockets:  # paths of sockets must be short
        changes = [*settings, f"run_dir={run_dir}", f"transport.endpoint=ipc://{sockets}/control.ipc"]
        arguments = ["--gpu", "cpu", "--config", CONFIG, *(word for change in changes for word in ("--set", change))]
        producer = _start("producer.cli", PRODUCER_CORE, arguments, run_dir / "producer.log")
        trainer = _start("consumer.app.cli", TRAINER_CORE, arguments, run_dir / "trainer.log")
        processes = [producer, trainer]
        try:
            while all(process.poll() is None for process in processes):
                time.sleep(0.2)
            if trainer.poll() == 0:
                producer.wait(_STOP_TIMEOUT_S)  # it ends with its trainer
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                    process.wait(_STOP_TIMEOUT_S)
    codes = [process.returncode for process in processes]
    if any(codes):
        tails = [log.read_text(errors="replace")[-2000:] for log in sorted(run_dir.glob("*.log"))]
        sys.exit(f"{run_dir}: the pair failed, exit codes {codes}\n" + "\n---\n".join(tails))


def pinned(cores: Sequence[int]) -> dict[str, str]:
    """Environment of a process that computes with one thread on each of `cores`."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _start(module: str, core: int, arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    command = ["taskset", "-c", str(core), sys.executable, "-m", module, *arguments]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=pinned([core]), stdout=out, stderr=subprocess.STDOUT)
