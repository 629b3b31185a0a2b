"""`make bench-offpolicy`: what staleness costs in accuracy after equal optimizer steps, and what each correction saves.

Guarantee: staleness is scripted, so it is exact; runs of one seed see the same prompts at the same step. Every finished run
lies in a file of its own and is not repeated, unless it was made with other settings; `--again` repeats all of them.
"""

import argparse
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from benchmarks.made_on import made_on
from benchmarks.offpolicy_report import tables
from benchmarks.offpolicy_run import Case, Plan, train
from benchmarks.tasks import TASKS
from examples.folders import fresh_folder
from protocol.config.learning import Preset

STALENESSES = (0, 1, 4, 8)
PRESETS = ("none", "token_truncate", "token_mask", "geometric_mask", "icepop")
LEARNING_RATES = {"sums": 3e-3, "smollm2": 4e-4}
"""Two to three times those of the examples, at which staleness shows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/offpolicy"), help="folder of the results")
    parser.add_argument("--plot", type=Path, help="picture to write, e.g. docs/images/offpolicy.png")
    parser.add_argument("--seeds", type=int, default=3, help="runs per cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESSES)
    parser.add_argument("--presets", nargs="+", choices=get_args(Preset), default=PRESETS)
    parser.add_argument("--learning-rate", type=float, help=f"(default: {LEARNING_RATES})")
    parser.add_argument("--evaluate-every", type=int, default=5, help="steps, a divisor of --steps (default: 5)")
    parser.add_argument("--base", help="folder of the model with train.jsonl and eval.jsonl (default: the demo's)")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="repeat what is there already")
    parser.add_argument("--quick", action="store_true", help="a few steps of a few runs: does it work at all?")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.evaluate_every, arguments.seeds = 4, 2, 1
    stalenesses, presets = ((0, 2), PRESETS[:2]) if arguments.quick else (arguments.staleness, arguments.presets)
    if arguments.steps % arguments.evaluate_every:
        parser.error("--evaluate-every must divide --steps")

    if arguments.base is None:
        TASKS[arguments.task].build()
    base = str(arguments.base or TASKS[arguments.task].base.absolute())
    rate = arguments.learning_rate or LEARNING_RATES[arguments.task]
    plan = Plan(arguments.task, arguments.steps, rate, arguments.evaluate_every, base)
    seeds = range(1, arguments.seeds + 1)
    cases = [Case(preset, *one) for *one, preset in itertools.product(reversed(stalenesses), seeds, presets)]
    results = _scripted(plan, cases, arguments.out, arguments.workers, arguments.again)
    summary = tables(results, stalenesses, presets)
    report = {"plan": asdict(plan), "scripted": results}
    (arguments.out / "results.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (arguments.out / "tables.md").write_text(summary + "\n", encoding="utf-8")
    print(f"\n{summary}\n\nwritten: {arguments.out}/results.json, {arguments.out}/tables.md")
    if arguments.plot is not None:
        from benchmarks.offpolicy_report import draw

        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(results, stalenesses, presets, arguments.plot)


def _scripted(plan: Plan, cases: list[Case], out: Path, workers: int, again: bool) -> list[dict[str, Any]]:
    """The results of all cases; what is missing is trained, each run by one thread of a process of its own."""
    missing = [case for case in cases if again or _finished(plan, _file(out, case)) is None]
    made = made_on()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_train_and_write, plan, case, _file(out, case), made): case for case in missing}
        for future in tqdm(as_completed(futures), total=len(futures), unit="run", disable=not futures):
            result = future.result()
            tqdm.write(f"{futures[future].name}: {result['final']:.3f} after {result['wall_s']:.0f} s")
    return [json.loads(_file(out, case).read_text(encoding="utf-8")) for case in cases]


def _file(out: Path, case: Case) -> Path:
    return out / f"{case.name}.json"


def _finished(plan: Plan, file: Path) -> dict[str, Any] | None:
    """The result in `file`, if it is one of this plan."""
    if not file.is_file():
        return None
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result if result["plan"] == asdict(plan) else None


def _train_and_write(plan: Plan, case: Case, file: Path, made: dict[str, str]) -> dict[str, Any]:
    """Trains in an empty folder; the file appears whole or not at all."""
    run_dir = file.parent / "work" / file.stem
    fresh_folder(run_dir)
    result = train(plan, case, run_dir) | made
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
    partial.replace(file)
    return result


if __name__ == "__main__":
    main()
