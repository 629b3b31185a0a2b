"""The demo: build a small base model once, let a real producer and a real trainer teach it, show what came of it.

    python -m examples.arithmetic.demo [--seed 1] [--run-dir runs/demo] [--gpus PRODUCER,TRAINER]

The two daemons are started exactly as a user would start them, as two processes that share nothing but a socket.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from examples.folders import build_once, fresh_folder
from protocol.errors import DeviceError
from protocol.gpu.nvml import VISIBLE, visible_gpus

CONFIG = "examples/arithmetic/run.yaml"
BASE = Path("runs/demo-base")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="prompt order, sampling and LoRA initialization")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="replaced if a demo made it")
    parser.add_argument(
        "--gpus", help="GPU of the producer and of the trainer, e.g. 0,1 (default: what the machine has)"
    )
    arguments = parser.parse_args()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # imported, it warns of a kernel that nothing here needs

    fresh_folder(arguments.run_dir)
    build_base_model()
    from examples.arithmetic.evaluate import greedy_accuracy

    eval_before = greedy_accuracy(BASE, BASE / "eval.jsonl")
    print(f"held-out greedy accuracy of the base model: {eval_before:.3f}", flush=True)

    settings = ["--config", CONFIG, "--set", f"run_dir={arguments.run_dir}", "--set", f"seed={arguments.seed}"]
    started = time.monotonic()
    run_pair(arguments.run_dir, settings, arguments.gpus.split(",") if arguments.gpus else default_gpus())
    wall_s = time.monotonic() - started

    eval_after = greedy_accuracy(BASE, BASE / "eval.jsonl", arguments.run_dir / "adapter")
    from examples.arithmetic.report import plot, shortfalls, summarize, table

    summary = summarize(arguments.run_dir, eval_before=eval_before, eval_after=eval_after, wall_s=wall_s)
    (arguments.run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    plot(arguments.run_dir)
    print(table(summary))
    print(f"written: {arguments.run_dir}/summary.json, {arguments.run_dir}/reward.png, {arguments.run_dir}/adapter")
    if missed := shortfalls(summary):
        sys.exit(f"the demo did not reach what every seed reached so far: {'; '.join(missed)}")


def build_base_model() -> None:
    """Builds the base model unless this very script has built it before."""
    script = Path(__file__).with_name("build_model.py").read_bytes()
    command = [sys.executable, "-m", "examples.arithmetic.build_model"]
    build_once(BASE, script, lambda folder: subprocess.run([*command, str(folder)], check=True))


def default_gpus() -> list[str]:
    """Return two GPUs if the machine has two, one shared if it has one, else the CPU."""
    try:
        count = len(visible_gpus(os.environ.get(VISIBLE)))
    except DeviceError:
        return ["cpu", "cpu"]
    return ["cpu", "cpu"] if count == 0 else ["0", "1" if count > 1 else "0"]


def run_pair(
    run_dir: Path, settings: list[str], gpus: list[str], sharing: str = "shared", producer: str = "producer.app.cli"
) -> None:
    """Starts both daemons, waits for the trainer to finish, and for the producer to follow it. `sharing` is `pipeline.gpu` where
    both have one GPU, and `producer` the module that is run for `rl-producer`."""
    producer_log = run_dir / "producer.log"
    commands = {
        "rl-producer": [sys.executable, "-m", producer, "--gpu", gpus[0], *settings],
        "rl-trainer": [sys.executable, "-m", "consumer.app.cli", "--gpu", gpus[1], *settings],
    }
    if gpus[0] == gpus[1] != "cpu":
        for command in commands.values():
            command += ["--set", f"pipeline.gpu={sharing}"]
    for name, command in commands.items():
        print(f"starting {name} {' '.join(command[3:])}", flush=True)
    print(f"the producer's messages go to {producer_log}; loading vLLM takes some 20 seconds", flush=True)
    with producer_log.open("wb") as log:
        processes = {
            "rl-producer": subprocess.Popen(commands["rl-producer"], stdout=log, stderr=subprocess.STDOUT),
            "rl-trainer": subprocess.Popen(commands["rl-trainer"]),
        }
        try:
            wait_for(processes)
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(STOP_TIMEOUT_S)
    failed = {name: process.returncode for name, process in processes.items() if process.returncode != 0}
    if failed:
        tail = "\n".join(producer_log.read_text(errors="replace").splitlines()[-30:])
        sys.exit(f"the pair failed, exit codes {failed}; the producer's last messages:\n{tail}")


def wait_for(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait until the trainer has ended (and the producer, which ends with it), or the producer has died."""
    while processes["rl-trainer"].poll() is None:
        if processes["rl-producer"].poll() not in (None, 0):
            return
        time.sleep(0.2)
    processes["rl-producer"].wait(STOP_TIMEOUT_S)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    main()
