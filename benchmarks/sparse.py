"""`make bench-sparse`: accuracy per generated token when rewards are sparse, without and with replay and rerolls.

Guarantee: every arm has the same model, prompts, budget of generated tokens and seeds, and a batch size and learning
rate of its own. `--explore` compares those, on other seeds than the table's. Every finished run lies in a file of its
own and is not repeated, unless it was made with other settings; `--again` repeats all of them.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import sparse_base
from benchmarks.sparse_report import tables
from benchmarks.sparse_run import ARMS, Case, Plan, train

GROUPS_PER_STEP, LEARNING_RATES = (2, 4, 8, 16), (1e-3, 2e-3, 4e-3)  # to explore
FIRST_EXPLORED_SEED = 100
BASE = Path("runs/sparse-base")
CARELESS, PRE_TRAINING_STEPS = 0.95, 250  # so that it sums right on 1.5 % of its samples, on some sums far more rarely
NUM_PROMPTS = 384  # three and a half epochs in 40,000 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/sparse"), help="folder of the results")
    parser.add_argument("--plot", type=Path, help="picture to write, e.g. docs/images/sparse.png")
    parser.add_argument("--seeds", type=int, default=3, help="runs per arm (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40_000, help="to generate in a run (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all of them")
    parser.add_argument("--explore", action="store_true", help="batch sizes and learning rates, instead of the table")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of every arm")
    parser.add_argument("--again", action="store_true", help="repeat what is there already")
    parser.add_argument("--quick", action="store_true", help="a few steps of two arms: does it work at all?")
    arguments = parser.parse_args()

    if arguments.quick:
        base, arms, seeds = arguments.out / "base", ["plain", "all"], range(1, 2)
        sparse_base.build(base, careless=0.0, steps=60, num_prompts=NUM_PROMPTS)
        plan = Plan(str(base), 2400, evaluations=3)
    else:
        first_seed = FIRST_EXPLORED_SEED if arguments.explore else 1
        base, arms, seeds = BASE, arguments.arms, range(first_seed, first_seed + arguments.seeds)
        sparse_base.build(base, careless=CARELESS, steps=PRE_TRAINING_STEPS, num_prompts=NUM_PROMPTS)
        plan = Plan(str(base), arguments.tokens, evaluations=80)
    extra = tuple(arguments.set)
    if arguments.explore:
        grid = itertools.product(arms, GROUPS_PER_STEP, LEARNING_RATES, seeds)
        cases = [Case(arm, seed, groups, rate, extra) for arm, groups, rate, seed in grid]
    else:
        own = {arm: (ARMS[arm].groups_per_step, ARMS[arm].learning_rate) for arm in arms}
        cases = [Case(arm, seed, *own[arm], extra) for arm, seed in itertools.product(arms, seeds)]
    workers = 1 if arguments.quick else arguments.workers
    results = _run(plan, cases, arguments.out / "runs", workers, arguments.again, None if arguments.quick else 1)
    summary = tables(plan, results)
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    report = {"plan": asdict(plan), "machine": machine, "runs": results}
    name = "explored" if arguments.explore else "results"
    (arguments.out / f"{name}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (arguments.out / f"{name}.md").write_text(summary + "\n", encoding="utf-8")
    print(f"\n{summary}\n\nwritten: {arguments.out}/{name}.json, {arguments.out}/{name}.md")
    if arguments.plot is not None and not arguments.explore:
        from benchmarks.sparse_picture import draw

        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(plan, results, arguments.plot)


def _run(
    plan: Plan, cases: Sequence[Case], folder: Path, workers: int, again: bool, runs_per_process: int | None
) -> list[dict[str, Any]]:
    """The results of all cases; what is missing is trained, each run by one thread."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {case: folder / f"{case.name}.json" for case in cases}
    missing = [case for case in cases if again or not _is_finished(plan, case, files[case])]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=runs_per_process) as pool:
        futures = {pool.submit(_train_and_write, plan, case, files[case]): case for case in missing}
        for future in tqdm(as_completed(futures), total=len(futures), unit="run", disable=not futures):
            result = future.result()
            tokens, steps, greedy, expected = result["curve"][-1]
            tqdm.write(
                f"{result['name']}: greedy accuracy {greedy:.3f}, sampled {expected:.3f} after {tokens:,} tokens and "
                f"{steps} steps; {result['wall_s']:.0f} s"
            )
    return [json.loads(files[case].read_text(encoding="utf-8")) for case in cases]


def _is_finished(plan: Plan, case: Case, file: Path) -> bool:
    if not file.is_file():
        return False
    result = json.loads(file.read_text(encoding="utf-8"))
    return bool(result["plan"] == asdict(plan) and result["settings"] == case.settings)


def _train_and_write(plan: Plan, case: Case, file: Path) -> dict[str, Any]:
    """The file appears whole or not at all."""
    result = train(plan, case)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
    partial.rename(file)
    return result


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(Path(__file__).parents[1])
    main()
