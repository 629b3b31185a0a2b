"""`make bench-overlap`: generation beside training, as the pair does it, in turns, and as TRL's asynchronous trainer does it.

Guarantee: all arms learn the same task (`benchmarks.tasks`) on the same cores. The engine or server has one thread, on core 0.
The trainer's processes have one thread each, on both cores. The arms take turns, in another order each round. TRL is tuned: the
first round runs it with each number of tasks in flight, the others with the fastest. Every finished run is a line of `--out`,
with accuracy at its checkpoints, and is not repeated.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.finished_runs import FinishedRuns
from benchmarks.overlap_report import OWN, SERVED, TRL, WARM_UP, draw, fastest, table
from benchmarks.tasks import TASKS
from benchmarks.watch import Watch
from consumer.learn.options import build_lora
from examples.folders import fresh_folder
from producer.engine.configuration import ON_CPU
from protocol.config.loader import load_config
from protocol.runtime import json_lines
from tests.integration.vllm_server import wait_until_healthy
from tests.unit.protocol.channel_harness import reserve_port

FOLDER = Path("runs/bench/overlap").absolute()
_ENGINE_CORE = "0"
_CHECKPOINTS = 10  # of a run
_END_S, _STOP_S = 3600.0, 60.0


class Case(NamedTuple):
    """One run. `inflight` counts TRL's tasks, and is 0 for ours."""

    task: str
    arm: str
    staleness: int
    inflight: int
    round: int
    steps: int

    @property
    def folder(self) -> Path:
        words = (self.task, self.arm.replace(" ", "-"), f"s{self.staleness}", f"f{self.inflight}", f"r{self.round}")
        return FOLDER / "-".join(words)

    @property
    def save_steps(self) -> int:
        return max(1, self.steps // _CHECKPOINTS)

    @property
    def settings(self) -> list[str]:
        """The values that differ from the example's."""
        return [
            f"seed={self.round}", f"pipeline.max_staleness={self.staleness}", f"trainer.max_steps={self.steps}",
            f"trainer.save_steps={self.save_steps}", f"trainer.save_total_limit={self.steps}",
        ]  # fmt: skip


class Run:
    """The processes of a case, which end with it."""

    def __init__(self, case: Case, stack: ExitStack, watch: Watch) -> None:
        self.case, self.stack, self._watch = case, stack, watch
        self.config = load_config(TASKS[case.task].config, case.settings)

    def start(self, side: str, module: str, words: list[str]) -> "subprocess.Popen[bytes]":
        """Start a process of the side `engine` or `trainer`, whose output goes to a file."""
        bound = ["taskset", "-c", _ENGINE_CORE] if side == "engine" else []
        changes = {
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_OMP_THREADS_BIND": _ENGINE_CORE,
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with (self.case.folder / f"{module.partition('.')[0]}.log").open("wb") as log:
            process = subprocess.Popen(
                [*bound, sys.executable, "-m", module, *words], env=os.environ | changes, stdout=log, stderr=log
            )
        self.stack.callback(_end, process)
        self._watch.add(side, process.pid)
        return process

    def serve(self) -> str:
        """Start a vLLM server, wait for it, and return its address."""
        port = reserve_port(self.stack)
        rank, engine = build_lora(self.config).r, self.config.engine
        words = [
            *("--model", str(TASKS[self.case.task].base), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--max-model-len", str(engine["max_model_len"]), "--max-num-seqs", str(engine["max_num_seqs"])),
            *("--enforce-eager", "--enable-lora", "--max-loras", str(self.case.staleness + 3), "--max-lora-rank"),
            *(str(rank), "--logprobs-mode", "processed_logprobs"),
            *("--distributed-executor-backend", ON_CPU["distributed_executor_backend"]),
        ]  # fmt: skip
        server = self.start("engine", "vllm.entrypoints.openai.api_server", words)
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server, self.case.folder / "vllm.log")
        return url


def run(case: Case) -> dict[str, Any]:
    fresh_folder(case.folder)
    began = time.time()
    with ExitStack() as stack:
        watch = stack.enter_context(Watch())
        run = Run(case, stack, watch)
        url = run.serve() if case.arm != OWN else None
        served = time.time()
        (_train_trl if case.arm == TRL else _train_pair)(run, url)
        ended = time.time()
        lines = steps(case)
        if len(lines) < case.steps:
            sys.exit(f"{case.folder}: {len(lines)} of {case.steps} steps: see its logs")
        used = watch.between(lines[0]["t"], lines[-1]["t"])
    names = ("t", "reward", "wait_s", "step_s", "tokens", "sync_s")
    return case._asdict() | used | {
        "server_start_s": round(served - began, 1), "whole_s": round(ended - served, 1),
        "dropped": _dropped(case, lines, run.config.sampling.num_generations),
        "steps_of": {name: [line.get(name) for line in lines] for name in names},
        "accuracy": [[lines[number - 1]["t"] - lines[0]["t"], number, score] for number, score in _scores(case)],
    }  # fmt: skip


def _dropped(case: Case, lines: list[dict[str, Any]], of_a_group: int) -> int:
    """Return the number of completions that were sampled and were too old to be trained."""
    if case.arm == TRL:
        return int(sum(line["dropped"] or 0 for line in lines))
    counts = lines[-1]["counts"]
    return of_a_group * (counts.get("stale", 0) + counts.get("went_stale", 0))


def _train_pair(run: Run, url: str | None) -> None:
    case, sockets = run.case, run.stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap-"))
    changes = [*case.settings, f"run_dir={case.folder}", f"transport.endpoint=ipc://{sockets}/control.ipc"]
    changes += ["evaluation=null", "observability.progress=false"]
    if url is not None:
        adapters = f"engine_server.adapter_dir={sockets}/adapters"
        changes += ["engine={}", "swap.mode=adapter", f"engine_server.url={url}", adapters]
    words = ["--gpu", "cpu", "--config", TASKS[case.task].config]
    words += [word for change in changes for word in ("--set", change)]
    producer = run.start("engine" if url is None else "trainer", "producer.app.cli", words)
    trainer = run.start("trainer", "consumer.app.cli", words)
    deadline = time.monotonic() + _END_S
    while trainer.poll() is None and producer.poll() in (None, 0) and time.monotonic() < deadline:
        time.sleep(0.1)


def _train_trl(run: Run, url: str | None) -> None:
    case = run.case
    words = [case.task, str(case.folder), str(url), str(case.inflight), str(case.save_steps), *case.settings]
    run.start("trainer", "benchmarks.async_trl", words).wait(_END_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def steps(case: Case) -> list[dict[str, Any]]:
    return json_lines.read(case.folder / "steps.jsonl")


def _scores(case: Case) -> Iterator[tuple[int, float]]:
    folders = (case.folder / ("trl" if case.arm == TRL else "checkpoints")).glob("checkpoint-*")
    for number, folder in sorted((int(folder.name.rpartition("-")[2]), folder) for folder in folders):
        yield number, TASKS[case.task].accuracy(folder)


def cases(options: argparse.Namespace, known: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the runs of each round; `known` grows meanwhile, and says which of TRL's settings was the fastest."""
    for number in range(1, options.rounds + 1):
        found = [Case(options.task, OWN, staleness, 0, number, options.steps) for staleness in (0, *options.staleness)]
        found += [Case(options.task, SERVED, staleness, 0, number, options.steps) for staleness in options.staleness]
        for staleness in options.staleness:
            tried = options.inflight if number == 1 else [fastest(known, options.task, staleness)]
            found += [Case(options.task, TRL, staleness, inflight, number, options.steps) for inflight in tried]
        yield from (case for case in (found if number % 2 else reversed(found)) if case.arm in options.arms)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--arms", nargs="+", choices=(OWN, SERVED, TRL), default=[OWN, SERVED, TRL])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--inflight", type=int, nargs="+", default=[16, 32, 64, 128], help="TRL's tasks at once")
    parser.add_argument("--out", type=Path, default=FOLDER.with_suffix(".jsonl"), help="file to append to")
    parser.add_argument("--plot", type=Path, help="picture to write, of all runs of the task in --out")
    options = parser.parse_args(argv)
    if options.steps < WARM_UP + 2:
        parser.error(f"--steps: the first {WARM_UP} are not timed, and two more are needed")
    TASKS[options.task].build()
    FOLDER.mkdir(parents=True, exist_ok=True)
    runs = FinishedRuns(options.out)
    for case in cases(options, runs.lines):
        if (found := runs.make(case, run)) is not None:
            print(*case, f"{found['whole_s']} s, accuracy {found['accuracy'][-1][2]:.3f}", flush=True)
    shown = [one for one in runs.lines if one["task"] == options.task]
    print(table(shown))
    if options.plot is not None:
        draw(shown, options.plot)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    main()
