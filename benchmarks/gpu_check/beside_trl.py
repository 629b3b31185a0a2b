"""The pair with merged weights, then TRL's asynchronous trainer, on one GPU (`benchmarks.overlap`): SmolLM2 learns sums in steps
of 32 groups of 8 at staleness 1. On a CPU the demo's model learns its own in smaller steps.
"""

import subprocess
from pathlib import Path

from benchmarks import overlap
from benchmarks.gpu_check.place import Findings, NotRunError, Place
from benchmarks.overlap_report import OWN, TRL, step_s, trained_per_s, waits
from benchmarks.tasks import TASKS


def run(place: Place) -> Findings:
    task, steps, groups, inflight = ("sums", 5, 4, 16) if place.on_cpu else ("smollm2", 30, 32, 256)
    try:
        TASKS[task].build()
    except subprocess.CalledProcessError as error:
        raise NotRunError(f"{TASKS[task].base} could not be made here; bring it along") from error

    class Case(overlap.Case):
        @property
        def folder(self) -> Path:
            return place.folder / self.arm.replace(" ", "-")

        @property
        def save_steps(self) -> int:
            return max(1, self.steps // 5)

        @property
        def settings(self) -> list[str]:
            changes = [f"pipeline.groups_per_step={groups}", "swap.mode=merged", "engine.max_num_seqs=256"]
            return super().settings + changes

    for arm, tasks in ((OWN, 0), (TRL, inflight)):
        found = overlap.run(Case(task, arm, 1, tasks, 1, steps), on_gpu=not place.on_cpu)
        names = ("whole_s", "server_start_s", "dropped")
        yield {
            "what": arm,
            "step_s": step_s(found),
            "trained_tokens_per_s": trained_per_s(found),
            "share_of_waiting": waits(found),
            **{name: found[name] for name in names},
        }
        for seconds, step, sampled, score in found["accuracy"]:
            shown = {"held_out": score, "seconds": seconds, "sampled_tokens": sampled}
            yield {"what": f"{arm}, after step {step}", **shown}
