"""`make bench-overlap`: generation beside training, as the pair does it, and as TRL's asynchronous trainer does it.

Guarantee: all arms learn the same task (`benchmarks.tasks`) on the same cores or the same GPU (`benchmarks.whole_runs`). The arms
take turns, in another order each round. TRL runs with its own number of tasks in flight and tuned: the first round runs it with
each of some numbers, the others with the fastest. Seconds and sampled tokens count, in all arms, from the first request for a
completion: engine or server and trainer are ready then. Checkpoints are evaluated after the run. Every finished run is a line of
`--out` and is not repeated.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.finished_runs import FinishedRuns
from benchmarks.overlap_report import ITS_OWN, OWN, SERVED, TRL, WARM_UP, fastest, ratios, table
from benchmarks.tasks import TASKS
from benchmarks.watch import Watch
from benchmarks.whole_runs import BEGAN, Run, first_request, journaled, scores, steps
from examples.folders import fresh_folder
from producer.engine.own_arguments import served_modules
from protocol.errors import DeviceError
from protocol.gpu.nvml import select_gpus

FOLDER = Path("runs/bench/overlap").absolute()
STEPS = {"sums": 40, "smollm2": 10, "lcm": 30, "times": 28}
SAVE_STEPS = {"sums": 4, "smollm2": 1, "lcm": 3, "times": 2}
INFLIGHT = {"sums": [ITS_OWN, 32, 64], "smollm2": [ITS_OWN, 24], "lcm": [ITS_OWN, 24], "times": [ITS_OWN, 24]}
"""Tasks in flight with which TRL runs in the first round."""

_END_S = 3600.0


class Case(NamedTuple):
    """One run. `inflight` counts TRL's tasks: -1 is its default, and 0 is ours, which has none."""

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
        return SAVE_STEPS[self.task]

    @property
    def settings(self) -> list[str]:
        """The values that differ from the example's."""
        return [
            f"dataset={{path: {TASKS[self.task].dataset}}}",
            f"seed={self.round}", f"pipeline.max_staleness={self.staleness}", f"trainer.max_steps={self.steps}",
            f"trainer.save_steps={self.save_steps}", f"trainer.save_total_limit={self.steps}",
        ]  # fmt: skip


def serve(run: Run, case: Case) -> str:
    """Serve the base and adapters, and return the address. The first completion, which takes seconds, is sampled before."""
    base = TASKS[case.task].base
    modules = served_modules(run.config.lora_section["target_modules"], base)
    url = run.serve(
        base, "--max-num-seqs", str(run.config.engine["max_num_seqs"]), "--enable-lora",
        *("--max-loras", str(case.staleness + 3), "--max-lora-rank", str(run.config.lora_section["r"])),
        *("--logprobs-mode", "processed_logprobs"),
        *(["--lora-target-modules", *modules] if modules else []),
    )  # fmt: skip
    request = {"model": str(base), "prompt": "1+1=", "max_tokens": 4, "logprobs": 0}
    httpx.post(f"{url}/v1/completions", json=request, timeout=600.0).raise_for_status()
    return url


def run(case: Case, *, on_gpu: bool) -> dict[str, Any]:
    fresh_folder(case.folder)
    started = time.time()
    with ExitStack() as stack:
        watch = stack.enter_context(Watch())
        run = Run(case, stack, watch, on_gpu=on_gpu)
        url = run.tokens.url = serve(run, case) if case.arm != OWN else None
        served = time.time()
        if case.arm == TRL:
            _train_trl(run, case, str(url))
        else:
            run.train_pair(url)
        ended = time.time()
        lines = steps(case, case.steps)
        used = watch.between(lines[0]["t"], lines[-1]["t"])
    began = float((case.folder / BEGAN).read_text()) if case.arm == TRL else first_request(case.folder)
    at = [began, *(line["t"] for line in lines)]
    sampled = [count - run.tokens.at([began])[0] for count in run.tokens.at(at)]
    names = ("t", "reward", "wait_s", "step_s", "tokens", "sync_s")
    found = scores(case, "trl" if case.arm == TRL else "checkpoints")
    return case._asdict() | used | {
        "server_start_s": round(served - started, 1), "whole_s": round(ended - served, 1),
        "dropped": _dropped(case, lines, run.config.sampling.num_generations),
        "journaled_tokens": None if case.arm == TRL else journaled(case.folder),
        "steps_of": {name: [line.get(name) for line in lines] for name in names},
        "accuracy": [[round(at[number] - began, 3), number, sampled[number], score] for number, score in found],
    }  # fmt: skip


def _dropped(case: Case, lines: list[dict[str, Any]], of_a_group: int) -> int:
    """Return the number of completions that were sampled and were too old to be trained."""
    if case.arm == TRL:
        return int(sum(line["dropped"] or 0 for line in lines))
    counts = lines[-1]["counts"]
    return of_a_group * (counts.get("stale", 0) + counts.get("went_stale", 0))


def _train_trl(run: Run, case: Case, url: str) -> None:
    words = [case.task, str(case.folder), url, str(case.inflight), str(case.save_steps), *run.settings]
    run.start("trainer", "benchmarks.async_trl", words).wait(_END_S)


def cases(options: argparse.Namespace, known: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the runs of each round; `known` grows meanwhile, and says which of TRL's settings was the fastest."""
    task, staleness, steps = options.task, options.staleness, options.steps or STEPS[options.task]
    for number in range(1, options.rounds + 1):
        arms = [(arm, 0) for arm in options.arms if arm != TRL]
        if TRL in options.arms:
            tried = options.inflight or INFLIGHT[task]
            kept = (
                tried
                if number == 1
                else [inflight for inflight in tried if inflight in (ITS_OWN, fastest(known, task))]
            )
            arms += [(TRL, inflight) for inflight in kept]
        for arm, inflight in arms if number % 2 else reversed(arms):
            yield Case(task, arm, staleness, inflight, number, steps)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=STEPS, default="sums")
    parser.add_argument("--arms", nargs="+", choices=(OWN, SERVED, TRL), default=[OWN, SERVED, TRL])
    parser.add_argument("--gpu", default="cpu", metavar="N|cpu", help="where all run (default: %(default)s)")
    parser.add_argument("--steps", type=int, help=f"(default: {STEPS})")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument(
        "--inflight", type=int, nargs="+", help=f"TRL's tasks; -1: its own number (default: {INFLIGHT})"
    )
    parser.add_argument("--out", type=Path, default=FOLDER.with_suffix(".jsonl"), help="file to append to")
    options = parser.parse_args(argv)
    if (options.steps or STEPS[options.task]) < WARM_UP + 2:
        parser.error(f"--steps: the first {WARM_UP} are not timed, and two more are needed")
    try:
        on_gpu = bool(select_gpus(options.gpu))
    except DeviceError as error:
        parser.error(str(error))
    TASKS[options.task].build()
    FOLDER.mkdir(parents=True, exist_ok=True)
    runs = FinishedRuns(options.out)
    for case in cases(options, runs.lines):
        if (found := runs.make(case, partial(run, on_gpu=on_gpu))) is not None:
            print(*case, f"{found['whole_s']} s, accuracy {found['accuracy'][-1][3]:.3f}", flush=True)
    print(table(runs.lines), ratios(runs.lines), sep="\n\n")


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    main()
