"""The demo: a small model learns from a real producer and a real trainer to guess a number in four turns.

    python -m examples.guessing.demo [--openenv PYTHON | --user] [--run-dir runs/guessing] [--steps 60] [--seed 1]

The other side is a class in a process beside the producer; with `--openenv` a server of OpenEnv, which this Python runs and which
needs its package `openenv`; with `--user` a second model, behind vLLM's server.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.arithmetic.demo import run_pair
from examples.folders import build_once, fresh_folder
from examples.guessing.game import TURNS
from slipstream.run_reader import EVALUATIONS, STEPS, RunReader

FOLDER = Path(__file__).parent
CONFIG = "examples/guessing/run.yaml"
BASE = Path("runs/guessing-base")
WINDOW = 5  # steps averaged for the first and the last reward
START_S = 300  # for a server to listen
_SERVER = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
"""Environment of the second model's server, GiB and threads. By default it takes most of the memory, and every core."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/guessing"), help="replaced if a demo made it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="prompt order, sampling and LoRA initialization")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--openenv", metavar="PYTHON", help="a Python with the package `openenv`")
    other.add_argument("--user", action="store_true", help="a second model is the other side")
    arguments = parser.parse_args()

    fresh_folder(arguments.run_dir)
    script = b"".join((FOLDER / name).read_bytes() for name in ("build_model.py", "game.py"))
    command = [sys.executable, "-m", "examples.guessing.build_model"]
    build_once(BASE, script, lambda folder: subprocess.run([*command, str(folder)], check=True))

    settings = ["--config", CONFIG, "--set", f"run_dir={arguments.run_dir}", "--set", f"seed={arguments.seed}"]
    settings += ["--set", f"model.path={BASE}", "--set", f"dataset.path={BASE}/train.jsonl"]
    settings += ["--set", f"evaluation.dataset.path={BASE}/eval.jsonl"]
    settings += ["--set", f"trainer.max_steps={arguments.steps}"]
    started = time.monotonic()
    with other_side(arguments) as chosen:
        run_pair(settings + chosen)
    run = RunReader(arguments.run_dir)
    steps, scores = run.lines(STEPS), run.lines(EVALUATIONS)
    rewards = [step["reward"] if arguments.user else step["spans/reward"] for step in steps]
    summary = {
        "found_before": scores[0]["score"],
        "found_after": scores[-1]["score"],
        "reward_first": sum(rewards[:WINDOW]) / WINDOW,
        "reward_last": sum(rewards[-WINDOW:]) / WINDOW,
        "wall_s": time.monotonic() - started,
    }
    (arguments.run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print("games won, greedy: " + ", ".join(f"{line['score']:.3f} at version {line['version']}" for line in scores))
    print("\n".join(f"  {name:<13} {value:.3f}" for name, value in summary.items()))


@contextmanager
def other_side(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Serve the other side while the context lasts; yield the settings of a run with it."""
    port = free_port()
    url, environment = f"http://127.0.0.1:{port}", dict[str, Any](max_turns=TURNS)
    if arguments.openenv:
        server = [arguments.openenv, str(FOLDER / "openenv_server.py"), str(port)]
        environment |= {"factory": "openenv", "options": {"url": url, "arguments": ["secret"]}}
        others = []
    elif arguments.user:
        from producer.engine.configuration import ON_CPU  # vLLM takes seconds

        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BASE), "--port", str(port)]
        server += ["--served-model-name", "user", "--max-model-len", "64", "--enforce-eager"]
        server += ["--distributed-executor-backend", ON_CPU["distributed_executor_backend"]]
        options = {"url": url, "model": "user", "prompt": "{secret}", "stop": "right", "max_tokens": 4}
        environment |= {"factory": "simulated_user", "options": options}
        others = ["--set", "rewards.outcome_weight=1"]
    else:
        yield []
        return
    with subprocess.Popen(server, env=_SERVER | os.environ) as process:
        try:
            wait_for(process, port)
            yield ["--set", f"environment={json.dumps(environment)}", *others]
        finally:
            process.terminate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_for(process: "subprocess.Popen[bytes]", port: int) -> None:
    """Wait until the process listens. Exit if it ends, or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.2)
    sys.exit("the server of the other side did not start")


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    main()
