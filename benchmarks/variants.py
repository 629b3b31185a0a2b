"""`python -m benchmarks.variants SET`: one setting at a time of the pair, on a task that learns, over seeds.

Guarantee: all runs of a task have the same model, cores (`benchmarks.whole_runs`), and steps or sampled tokens. Variants take
turns, in another order for each seed. Every finished run is a line of `--out`, with accuracy at its checkpoints over seconds,
steps and sampled tokens, and is not repeated.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

import numpy as np

from benchmarks.finished_runs import FinishedRuns
from benchmarks.tasks import TASKS
from benchmarks.variants_report import SHARE, draw, table
from benchmarks.watch import Watch
from benchmarks.whole_runs import CHECKPOINTS, Run, first_request, scores, steps
from examples.folders import fresh_folder
from protocol.config.learning import PipelineSection
from protocol.config.loader import load_config
from protocol.runtime import json_lines
from protocol.wire.codec import decode
from protocol.wire.messages import Group
from replay.journal.reader import JournalReader
from replay.journal.schema import GroupRow

FOLDER = Path("runs/bench/variants").absolute()

Settings = tuple[str, ...]
_FEW = ("dataset.max_rows=256",)
REMEDIES: dict[str, Settings] = {
    "default": (),
    "by source and signal": ("SOURCES", "dataset.sampling=by_signal"),
    "without rerolls": ("reroll.max_attempts=0",),
    "by source and signal, without rerolls": ("SOURCES", "dataset.sampling=by_signal", "reroll.max_attempts=0"),
    "replay": ("replay.mode=signal",),
    "replay, without rerolls": ("replay.mode=signal", "reroll.max_attempts=0"),
    **{f"{groups} groups a step": (f"pipeline.groups_per_step={groups}",) for groups in (4, 8)},
    "256 prompts": _FEW,
    "256 prompts, by signal": (*_FEW, "dataset.sampling=by_signal"),
    "256 prompts, cooldown": (*_FEW, "reroll.solved_cooldown_epochs=1"),
}
"""Settings against the wait for groups with signal. `SOURCES` stands for the task's rows as an easy and a hard source. What
is known of single prompts counts from the second epoch on, which takes few prompts."""

FILLS: dict[str, Settings] = {
    f"{fill}, {groups} groups": (f"pipeline.fill={fill}", f"pipeline.groups_per_step={groups}")
    for groups in (8, 16, 32)
    for fill in get_args(PipelineSection.model_fields["fill"].annotation)
}
"""When a batch is cut. Runs are compared by the tokens that they sample (`--tokens`)."""

_LONG = (
    "sampling.max_completion_length=192", "engine.max_model_len=320", "trainer.learning_rate=1e-6",
    "pipeline.groups_per_step=2",
)  # fmt: skip
SWAPS: dict[str, Settings] = {
    f"{mode}, {in_flight}": (f"swap.mode={mode}", f"swap.in_flight={in_flight}", *_LONG)
    for mode, ways in {"adapter": ("finish", "continue", "restart"), "merged": ("continue", "restart")}.items()
    for in_flight in ways
}
"""What becomes of requests in flight at a swap. At this learning rate completions keep the long tail that they begin with. Steps
are small, because an engine on a CPU is slow with adapters."""

TEACHERS: dict[str, Settings] = {
    "rewards": (),
    "teacher": ("distillation={mode: advantage, alone: true}",),
    "teacher, divergence": ("distillation={mode: divergence, alone: true, top_k: 8}",),
    "rewards and teacher": ("distillation={mode: advantage}",),
}
"""The teacher is what the task's default run came to, as a model of its own that a vLLM server serves."""


def _rewarded_by(function: str) -> str:
    return f"rewards.functions=[{{function: 'benchmarks.digits:{function}'}}]"


CREDIT: dict[str, Settings] = {
    "outcome, all digits": (_rewarded_by("all_right"),),
    "outcome, their number": (_rewarded_by("how_many_right"),),
    "per step": (_rewarded_by("each_right"), "rewards.credit=per_step"),
}
"""Rewards of the task `digits`: for all digits or nothing, for how many are right, and for each."""

WEIGHTS: dict[str, Settings] = {
    "LoRA": ("model.dtype=bfloat16", "swap.mode=adapter"),
    "DoRA": ("model.dtype=bfloat16", "swap={}", "lora.use_dora=true"),
    **{
        f"all weights, {rate}": ("model.dtype=bfloat16", "swap={}", "lora=null", f"trainer.learning_rate={rate}")
        for rate in ("1e-5", "3e-5", "1e-4", "3e-4", "1e-3")
    },
}
"""Adapters at the task's learning rate, and all weights at others: SmolLM2 needs the low ones. All compute in bfloat16."""

TURNS: dict[str, Settings] = {"turns of their own": (), "shared turns": ("environment.branch_after_turns=1",)}
"""A first turn for each completion, or one for all of a group, on the task `calculator`."""

SETS = {
    "remedies": REMEDIES, "fill": FILLS, "swaps": SWAPS, "teachers": TEACHERS, "credit": CREDIT, "weights": WEIGHTS,
    "turns": TURNS,
}  # fmt: skip
_TAUGHT = "distillation="


class Case(NamedTuple):
    """One run, of `steps`, or (not 0) until `tokens` are sampled."""

    task: str
    variant: str
    seed: int
    steps: int
    tokens: int = 0

    @property
    def folder(self) -> Path:
        name = f"{self.task} {self.variant} {self.seed} {self.tokens or self.steps}"
        return FOLDER / name.replace(",", "").replace(" ", "-")

    @property
    def taught(self) -> list[str]:
        """The settings that need a teacher."""
        return [change for change in _changes(self.variant) if change.startswith(_TAUGHT)]

    @property
    def settings(self) -> list[str]:
        changes = [change for change in _changes(self.variant) if not change.startswith(_TAUGHT)]
        common = [
            f"model.path={TASKS[self.task].base.absolute()}", f"dataset={{path: {TASKS[self.task].dataset}}}",
            f"seed={self.seed}",
        ]  # fmt: skip
        common += [word for change in changes for word in (sources(self.task) if change == "SOURCES" else [change])]
        most_steps, steps = self.steps, self.steps
        if self.tokens:
            config = load_config(TASKS[self.task].config, common)
            tokens_of_a_step = config.completions_per_step * config.sampling.max_completion_length
            most_steps, steps = self.tokens, self.tokens // tokens_of_a_step  # a step has at least one token
        return [
            *common, f"trainer.max_steps={most_steps}", f"trainer.save_total_limit={most_steps}",
            f"trainer.save_steps={max(1, steps // CHECKPOINTS)}",
        ]  # fmt: skip


def _changes(variant: str) -> Settings:
    return ChainMap(*SETS.values())[variant]


def sources(task: str) -> list[str]:
    """Return the settings that take a task's rows from an easy and from a hard source."""
    rows = TASKS[task].dataset
    both = ", ".join(
        f"{{name: {kind}, path: {rows}, filter: 'benchmarks.tasks:{task}_{kind}'}}" for kind in ("easy", "hard")
    )
    return ["dataset.path=null", f"dataset.sources=[{both}]"]


def run(case: Case) -> dict[str, Any]:
    fresh_folder(case.folder)
    with ExitStack() as stack:
        watch = stack.enter_context(Watch())
        run = Run(case, stack, watch)
        more: list[str] = []
        if case.taught:
            url = run.serve(teacher_of(case), "--max-num-seqs", "64")
            more = [f"teachers=[{{name: teacher, url: '{url}'}}]", *case.taught]
        run.train_pair(more=more, most_tokens=case.tokens)
    lines = steps(case, 1 if case.tokens else case.steps)
    used = watch.between(lines[0]["t"], lines[-1]["t"])
    with contextlib.closing(JournalReader(case.folder / "journal.sqlite")) as journal:
        groups = [Answered.of(journal, row) for row in journal.rows()]
    ended = [first_request(case.folder), *(line["t"] for line in lines)]
    sampled = run.tokens.at(ended)
    accuracy = [[ended[at] - ended[0], at, sampled[at] - sampled[0], score] for at, score in scores(case)]
    outcomes = [one.outcome for one in groups]
    names = ("t", "reward", "wait_s", "step_s", "tokens", "entropy", "staleness/mean", SHARE)
    return case._asdict() | used | {
        "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "skipped": lines[-1]["counts"].get("skipped", 0),
        "steps_of": {name: [line.get(name) for line in lines] for name in names},
        "accuracy": accuracy,
        "swaps": swaps(case.folder, lines, groups),
    }  # fmt: skip


def teacher_of(case: Case) -> Path:
    """Return the model that a default run of the task ends with, which is made once."""
    made = FOLDER / f"teacher-{case.task}"
    if not made.exists():
        of_teacher = Case(case.task, "rewards", 9, case.steps)
        fresh_folder(of_teacher.folder)
        with ExitStack() as stack:
            Run(of_teacher, stack, stack.enter_context(Watch())).train_pair()
        words = ["--gpu", "cpu", "--config", TASKS[case.task].config, "--set", f"run_dir={of_teacher.folder}"]
        subprocess.run([sys.executable, "-m", "slipstream", "export", *words, "--to", str(made)], check=True)
    return made


class Answered(NamedTuple):
    """A group that arrived at `at`, of Unix time, and was begun at `begun`."""

    at: float
    begun: float
    version: int
    tokens: int
    outcome: str
    longest: int
    median: float

    @classmethod
    def of(cls, journal: JournalReader, row: GroupRow) -> "Answered":
        message = decode(journal.body(row) or b"", Group)
        lengths = np.frombuffer(message.completion_lengths, "<i4")
        begun = row.accepted_at - message.generation_s - message.reward_s
        numbers = int(lengths.max()), float(np.median(lengths))
        return cls(row.accepted_at, begun, row.policy_version, row.num_tokens, row.outcome, *numbers)


def swaps(folder: Path, lines: list[dict[str, Any]], groups: list[Answered]) -> dict[str, Any]:
    """Return for each version the seconds from the end of its step until it is live, and until a group is begun with it; and the
    tokens that were sampled for nothing."""
    (file,) = folder.glob("producer-*.jsonl")
    events = json_lines.read(file)
    sampled = max(event["tokens"] + event["dropped_tokens"] for event in events if "tokens" in event)
    live = {event["version"]: event["t"] for event in events if event["event"] == "swap"}
    ended = {line["step"]: line["t"] for line in lines}
    versions = sorted(set(live) & set(ended))
    begun = {each: min((one.begun for one in groups if one.version >= each), default=None) for each in versions}
    used = sum(one.tokens for one in groups if one.outcome != "stale")
    return {
        "live_s": [live[each] - ended[each] for each in versions],
        "begun_s": [at - ended[each] for each in versions if (at := begun[each]) is not None],
        "wasted_tokens": sampled - used,
        "used_tokens": used,
        "lengths": {"median": median(one.median for one in groups), "longest": max(one.longest for one in groups)},
    }


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for seed in options.seeds:
        names = options.variants or list(SETS[options.set])
        for name in names if seed % 2 else reversed(names):
            yield Case(options.task, name, seed, options.steps, options.tokens)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these of the set")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=0, help="end each run when these are sampled, not after --steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=FOLDER.with_suffix(".jsonl"), help="file to append to")
    parser.add_argument("--plot", type=Path, help="picture to write, of all runs of the set in --out")
    options = parser.parse_args(argv)
    if unknown := set(options.variants or ()) - set(SETS[options.set]):
        parser.error(f"--variants: {', '.join(sorted(unknown))}: the set has {', '.join(SETS[options.set])}")
    TASKS[options.task].build()
    FOLDER.mkdir(parents=True, exist_ok=True)
    runs = FinishedRuns(options.out)
    for case in cases(options):
        if (found := runs.make(case, run)) is not None:
            seconds, _, tokens, score = found["accuracy"][-1]
            print(*case, f"{seconds:.0f} s, {tokens} tokens, accuracy {score:.3f}", flush=True)
    shown = [one for one in runs.lines if one["task"] == options.task and one["variant"] in SETS[options.set]]
    print(table(shown))
    if options.plot is not None:
        draw(shown, options.plot)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    main()
