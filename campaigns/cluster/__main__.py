"""`python -m campaigns.cluster --kills 100`: daemons, ranks and whole nodes of a run under Ray are killed, and nothing is lost.

Guarantee: at last Ray itself is killed. It exits with 0 only if the run went on after every kill, ended in good order, and the
checker of `campaigns.chaos`, which knows what the daemons did from their notes, found nothing lost and nothing trained twice. The
summary has the time from each kill to the first step after it and to the moment at which everything ran again.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from campaigns.chaos import collect
from campaigns.chaos.checker import check
from campaigns.chaos.run_folder import DEFAULT, prepare
from campaigns.cluster.machine import ClusterRun, cluster_run, eventually, kill, rank_of, raylet_of
from slipstream.cli import run as slipstream

_KINDS = {"producer": 5, "trainer": 2, "rank": 2, "node": 3}
_PRODUCERS = 3
_ALL = {"trainer", *(f"producer-{number}" for number in range(1, _PRODUCERS + 1))}
_UP = ("up", "--config", "run.yaml", "--gpus", "0", "--ranks", "2", "--producers", str(_PRODUCERS), "--detach")
_GOES_ON_S = 900.0


class Recovery(NamedTuple):
    kind: str
    hit_trainer: bool
    step_s: float  # until the first step after the kill
    whole_s: float  # until every daemon ran


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.cluster", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=1e9, help="no kill begins after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the summary to this file")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slipstream-cluster-"))
    summary = campaign(folder, chosen.kills, chosen.minutes, chosen.seed)
    text = json.dumps(summary, indent=1)
    print(text)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(text + "\n")
    if summary["ok"]:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    print(f"The run is in {folder}", file=sys.stderr)
    return 1


def campaign(folder: Path, kills: int, minutes: float, seed: int) -> dict[str, Any]:
    """One run from `up` to `down`, and its summary."""
    config = prepare(folder, folder, seed, DEFAULT)
    began, chance, recoveries = time.monotonic(), random.Random(seed), list[Recovery]()
    with cluster_run(folder, 3, 3, CLUSTER_EVIDENCE=str(folder)) as run:
        run.command(*_UP)
        eventually(lambda: (run.run_dir / "steps.jsonl").exists() and run.step() > 1, _GOES_ON_S)
        while len(recoveries) < kills and time.monotonic() - began < 60 * minutes:
            recoveries.append(_kill_one(run, chance))
            print(f"{len(recoveries)} of {kills}: {recoveries[-1]}", file=sys.stderr, flush=True)
        recoveries.append(_lose_ray(run))
        print(f"Ray itself: {recoveries[-1]}", file=sys.stderr, flush=True)
        said = run.command("down", "--config", "run.yaml")
    verdict = check(collect.collect(folder, config))
    verified = slipstream(["journal", "--run", str(folder / "run"), "verify"])
    counts = Counter(problem.kind for problem in verdict.problems)
    return {
        "ok": not verdict.problems
        and verified == 0
        and "trainer: ended with 0" in said
        and bool(verdict.fates["trained"]),
        "kills": dict(Counter(recovery.kind for recovery in recoveries)),
        "steps": collect.newest_checkpoint(folder / "run/checkpoints")["step"],
        "groups": dict(verdict.fates),
        "lost": counts["lost"],
        "trained_twice": counts["trained_twice"] + counts["prompt_twice"],
        "problems": [problem._asdict() for problem in verdict.problems][:20],
        "rl_journal_verify": verified,
        "recovery_s": _times(recoveries),
        "wall_s": round(time.monotonic() - began),
    }


def _kill_one(run: ClusterRun, chance: random.Random) -> Recovery:
    time.sleep(chance.uniform(0, 3))
    kind = chance.choices(list(_KINDS), list(_KINDS.values()))[0]
    processes = _all_of(run)
    step = run.step()
    trainer = processes["trainer"]
    victim = processes[chance.choice(sorted(_ALL - {"trainer"}))] if kind in ("producer", "node") else trainer
    if kind == "node" and chance.random() < 0.5:
        victim = trainer
    hit_trainer = victim == trainer or (kind == "node" and raylet_of(victim) == raylet_of(trainer))
    began = time.monotonic()
    if kind == "node":
        run.nodes.say(f"kill {raylet_of(victim)}")
        run.nodes.say("add")
    else:
        kill(rank_of(trainer) if kind == "rank" else victim)
    if hit_trainer:
        eventually(lambda: not trainer.is_running(), _GOES_ON_S)
        step = run.step()
    eventually(lambda: run.step() != step, _GOES_ON_S)
    step_s = time.monotonic() - began
    _all_of(run)
    return Recovery(kind, hit_trainer, round(step_s, 1), round(time.monotonic() - began, 1))


def _all_of(run: ClusterRun) -> dict[str, psutil.Process]:
    """The daemons, once all of them run."""
    found: list[dict[str, psutil.Process]] = [{}]

    def complete() -> bool:
        found[0] = run.processes()
        return set(found[0]) == _ALL

    eventually(complete, _GOES_ON_S)
    return found[0]


def _lose_ray(run: ClusterRun) -> Recovery:
    """Head and nodes at once; the same command finds the run's folder and goes on."""
    trainer, began = run.processes()["trainer"], time.monotonic()
    run.lose_ray()
    run.command(*_UP)
    eventually(lambda: not trainer.is_running(), _GOES_ON_S)
    step = run.step()
    eventually(lambda: run.step() != step, _GOES_ON_S)
    step_s = time.monotonic() - began
    _all_of(run)
    return Recovery("Ray", True, round(step_s, 1), round(time.monotonic() - began, 1))


def _times(recoveries: list[Recovery]) -> dict[str, Any]:
    """By what was hit: how many, median and worst, in seconds."""
    found: dict[str, list[Recovery]] = defaultdict(list)
    for recovery in recoveries:
        with_trainer = " with the trainer" if recovery.kind == "node" and recovery.hit_trainer else ""
        found[recovery.kind + with_trainer].append(recovery)
    return {
        kind: {
            "count": len(some),
            **{
                f"{name}_{what}": round(function(getattr(recovery, name) for recovery in some), 1)
                for name in ("step_s", "whole_s")
                for what, function in (("median", statistics.median), ("max", max))
            },
        }
        for kind, some in sorted(found.items())
    }


if __name__ == "__main__":
    sys.exit(main())
