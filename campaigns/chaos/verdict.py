"""The end of a campaign: the checker's verdict, the run trained again from its journal, and the numbers.

Guarantee: `ok` is true only if no promise was broken, the run trained again equals the one that was killed bit for bit in
every step that survived, and every daemon ended as it should.
"""

import hashlib
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from campaigns.chaos import collect
from campaigns.chaos.checker import check
from campaigns.chaos.evidence import read
from campaigns.chaos.fleet import Zygote
from campaigns.chaos.known import Problem
from campaigns.chaos.recovery_times import recoveries
from campaigns.chaos.slots import Tally
from consumer.learn.checkpoints import FINAL_FOLDERS
from protocol.runtime import json_lines as rotated_lines
from protocol.runtime.scratch import PREFIX

_RETRAIN_S = 900.0


class Retrained(NamedTuple):
    same: bool
    policies: int  # compared
    checkpoints: int
    wall_s: float
    problems: list[Problem]


def retrain(folder: Path, zygote: Zygote, final_step: int, sync_interval: int, ranks: int) -> Retrained:
    """`rl-trainer --from-journal`, in a process of its own that `zygote` forks."""
    started = time.monotonic()
    evidence, target = folder / "retrained.jsonl", folder / "retrained"
    arguments = [
        "rl-trainer", "--gpu", "cpu", "--config", str(folder / "run.yaml"), "--from-journal", str(folder / "run"),
        "--set", f"run_dir={target}", "--set", f"trainer.max_steps={final_step}", "--set", "trainer.save_total_limit=1000000",
        "--ranks", str(ranks),
    ]  # fmt: skip
    log = folder / "logs" / "retrained.log"
    daemon = zygote.start(arguments, log=log, evidence=evidence, child="campaigns.chaos.trainer_child")
    try:
        code = daemon.wait(_RETRAIN_S)
    finally:
        daemon.send(signal.SIGKILL)
    wall_s = round(time.monotonic() - started, 1)
    if code != 0:
        return Retrained(False, 0, 0, wall_s, [Problem("retrain", f"it ended with {code}:\n{daemon.tail()}")])
    chaos = [read(path) for path in collect.trainer_logs(folder)]
    compared, problems = Counter[str](), []
    for what, value in (("policy", "digest"), ("checkpoint", "weights")):
        ours, theirs = (collect.surviving(logs, what, value) for logs in (chaos, [read(evidence)]))
        for step in sorted(set(ours) & set(theirs)):
            compared[what] += 1
            if ours[step] != theirs[step]:
                problems.append(Problem("retrain", f"{what} of step {step} is {theirs[step]}, was {ours[step]}"))
    for file in (folder / "run").rglob("*model.safetensors"):
        other = target / file.relative_to(folder / "run")
        if file.parent.name in FINAL_FOLDERS or other.is_file():
            compared["files"] += 1
            if not other.is_file() or _digest(other) != _digest(file):
                problems.append(Problem("retrain", f"{file} and {other} differ"))
    if compared["policy"] != 1 + final_step // sync_interval or not compared["checkpoint"] or not compared["files"]:
        problems.append(Problem("retrain", f"only {dict(compared)} were there to compare, of {final_step} steps"))
    return Retrained(not problems, compared["policy"], compared["checkpoint"], wall_s, problems)


def summarize(
    folder: Path,
    config: dict[str, Any],
    tally: Tally,
    *,
    seed: int,
    wall_s: float,
    trains_again: Zygote | None,
    ranks: int = 1,
) -> dict[str, Any]:
    """Everything that `summary.json` says. `ok` is its verdict, `problems` the evidence.

    Args:
        trains_again: forks the trainer that trains the run again, if that is to be compared.
    """
    evidence = collect.collect(folder, config)
    verdict = check(evidence)
    problems = list(verdict.problems)
    retrained = None
    if trains_again is not None:
        retrained = retrain(folder, trains_again, evidence.final_step, evidence.rules.sync_interval, ranks)
        problems += retrained.problems
    served = _weights_served(folder)
    problems += served.problems
    lines = [line["step"] for line in rotated_lines.read(folder / "run" / "steps.jsonl")]
    if lines != list(range(1, evidence.final_step + 1)):
        problems.append(Problem("steps", "steps.jsonl does not name every step once and in order"))
    times = [one for found in recoveries(tally.restarts, _signs_of_life(folder)).values() for one in found]
    seconds = [one for one in times if one is not None]
    answers = Counter(answer.outcome for answer in evidence.answers)
    return {
        "ok": not problems,
        "seed": seed,
        "kills": tally.kills,
        "stops": tally.stops,
        "groups_acked": answers["accepted"],
        "lost": verdict.count("lost"),
        "trained_twice": verdict.count("trained_twice"),
        "replayed_bit_for_bit": retrained.same if retrained else None,
        **{f"recovery_p{share}_s": round(float(np.percentile(seconds or [np.nan], share)), 3) for share in (50, 99)},
        "recoveries": len(seconds),
        "recoveries_cut_short": len(times) - len(seconds),
        "second_trainers_refused": tally.rivals,
        "producers_not_told": tally.producers_not_told,
        "steps": evidence.final_step,
        "steps_undone": _steps_undone(evidence),
        "accepted_by_fate": dict(verdict.fates),
        "answers": dict(answers),
        "num_replays": verdict.num_replays,
        "rerolls": verdict.rerolls,
        "quarantined": sum(row.dropped == "quarantined" for row in evidence.rows.values()),
        "dead_letters": len(evidence.dead),
        "epochs": evidence.epoch,
        "kills_by_kind": dict(tally.by_kind.most_common()),
        "kills_by_point": dict(sorted(tally.by_point.items())),
        "stops_by_point": dict(sorted(tally.stops_by_point.items())),
        "weights_compared": served.compared,
        "versions_with_anchor": served.anchored,
        "policies_compared": retrained.policies if retrained else 0,
        "checkpoints_compared": retrained.checkpoints if retrained else 0,
        "wall_s": round(wall_s, 1),
        "retraining_s": retrained.wall_s if retrained else 0.0,
        "folders_left_by_killed_producers": len(list((folder / "tmp").glob(f"{PREFIX}*"))),
        "problems": [problem._asdict() for problem in problems],
    }


class _Served(NamedTuple):
    """The number of times that an engine's weights were a policy's, bit by bit, and of versions that had an anchor."""

    compared: int
    anchored: int
    problems: list[Problem]


def _weights_served(folder: Path) -> _Served:
    """Compare the weights of engines with the published ones, and the patches of equal weights."""
    published = [line for path in collect.trainer_logs(folder) for line in read(path) if line["what"] == "published"]
    known = {(line["digest"][:8], line["weights"]) for line in published}
    served = [
        (path.stem, (line["policy"], line["weights"]))
        for path in sorted(folder.glob("producer-*.jsonl"))
        for line in read(path)
        if line["what"] == "weights"
    ]
    problems = [
        Problem("weights", f"{name} served {each}, which was not published")
        for name, each in served
        if each not in known
    ]
    digests: dict[tuple[int, str], str] = {}
    for line in published:
        version = line["version"]
        if digests.setdefault((version, line["weights"]), line["digest"]) != line["digest"]:
            problems.append(Problem("weights", f"v{version} was published again as another patch of equal weights"))
    return _Served(len(served), sum(line["anchor"] is not None for line in published), problems)


def _steps_undone(evidence: Any) -> int:
    return sum(len(incarnation.steps_ended) for incarnation in evidence.incarnations) - evidence.final_step


def _signs_of_life(folder: Path) -> dict[str, list[float]]:
    """By daemon: steps that ended and acknowledgements for the trainer, its acknowledged groups for a producer."""
    signs: dict[str, list[float]] = {"trainer": []}
    for path in folder.glob("producer-*.jsonl"):
        signs[path.stem] = [line["t"] for line in read(path) if line["what"] == "ack"]
        signs["trainer"] += signs[path.stem]
    for path in collect.trainer_logs(folder):
        signs["trainer"] += [line["t"] for line in read(path) if line["what"] == "step_end"]
    return signs


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
