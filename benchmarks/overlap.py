"""`make bench-overlap`: generation beside training, as the pair does it, in turns, and as TRL's asynchronous trainer does it.

Guarantee: all arms learn the same task (`benchmarks.tasks`) on the same cores or the same GPU
(`benchmarks.whole_runs`). The arms take turns, in another order each round. TRL is tuned: the first round runs it with each
number of tasks in flight, the others with the fastest. Every finished run is a line of `--out`, with accuracy at its checkpoints,
and is not repeated.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.finished_runs import FinishedRuns
from benchmarks.overlap_report import OWN, SERVED, TRL, WARM_UP, draw, fastest, table
from benchmarks.tasks import TASKS
from benchmarks.watch import Watch
from benchmarks.whole_runs import CHECKPOINTS, Run, sampled_until, scores, steps
from examples.folders import fresh_folder
from producer.engine.own_arguments import served_modules
from protocol.errors import DeviceError
from protocol.gpu.nvml import select_gpus

FOLDER = Path("runs/bench/overlap").absolute()
_END_S = 3600.0


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
        return max(1, self.steps // CHECKPOINTS)

    @property
    def settings(self) -> list[str]:
        """The values that differ from the example's."""
        return [
            f"dataset={{path: {TASKS[self.task].dataset}}}",
            f"seed={self.round}", f"pipeline.max_staleness={self.staleness}", f"trainer.max_steps={self.steps}",
            f"trainer.save_steps={self.save_steps}", f"trainer.save_total_limit={self.steps}",
        ]  # fmt: skip


def serve(run: Run, case: Case) -> str:
    """Serve the base and adapters, and return the address."""
    modules = served_modules(run.config.lora_section["target_modules"], TASKS[case.task].base)
    return run.serve(
        TASKS[case.task].base, "--max-num-seqs", str(run.config.engine["max_num_seqs"]), "--enable-lora",
        *("--max-loras", str(case.staleness + 3), "--max-lora-rank", str(run.config.lora_section["r"])),
        *("--logprobs-mode", "processed_logprobs"),
        *(["--lora-target-modules", *modules] if modules else []),
    )  # fmt: skip


def run(case: Case, *, on_gpu: bool) -> dict[str, Any]:
    fresh_folder(case.folder)
    began = time.time()
    with ExitStack() as stack:
        watch = stack.enter_context(Watch())
        run = Run(case, stack, watch, on_gpu=on_gpu)
        url = serve(run, case) if case.arm != OWN else None
        served = time.time()
        if case.arm == TRL:
            _train_trl(run, case, str(url))
        else:
            run.train_pair(url)
        ended = time.time()
        lines = steps(case, case.steps)
        used = watch.between(lines[0]["t"], lines[-1]["t"])
    found = scores(case, "trl" if case.arm == TRL else "checkpoints")
    if case.arm != TRL:
        for line, sampled in zip(lines, sampled_until(case.folder, [line["t"] for line in lines]), strict=True):
            line["sampled"] = sampled
    names = ("t", "reward", "wait_s", "step_s", "tokens", "sampled", "sync_s")
    return case._asdict() | used | {
        "server_start_s": round(served - began, 1), "whole_s": round(ended - served, 1),
        "dropped": _dropped(case, lines, run.config.sampling.num_generations),
        "steps_of": {name: [line.get(name) for line in lines] for name in names},
        "accuracy": [[lines[number - 1]["t"] - lines[0]["t"], number, score] for number, score in found],
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
    parser.add_argument("--gpu", default="cpu", metavar="N|cpu", help="where all run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--inflight", type=int, nargs="+", default=[16, 32, 64, 128], help="TRL's tasks at once")
    parser.add_argument("--out", type=Path, default=FOLDER.with_suffix(".jsonl"), help="file to append to")
    parser.add_argument("--plot", type=Path, help="picture to write, of all runs of the task in --out")
    options = parser.parse_args(argv)
    if options.steps < WARM_UP + 2:
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
            print(*case, f"{found['whole_s']} s, accuracy {found['accuracy'][-1][2]:.3f}", flush=True)
    shown = [one for one in runs.lines if one["task"] == options.task]
    print(table(shown))
    if options.plot is not None:
        draw(shown, options.plot)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    main()
