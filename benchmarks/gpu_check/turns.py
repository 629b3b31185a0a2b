"""Both daemons on one GPU in turns (`pipeline.gpu: turns`), each with most of the memory: what a change of sides takes.

On a CPU, where vLLM cannot sleep, the engine is a scripted one, and what runs is the taking of turns alone.
"""

import json
import statistics

import yaml

from benchmarks.gpu_check.model import sections
from benchmarks.gpu_check.place import Findings, Place
from examples.arithmetic.demo import run_pair
from slipstream.run_reader import STEPS, RunReader

_ENGINE_SHARE = 0.85  # of the GPU, which leaves the trainer too little to work beside it


def run(place: Place) -> Findings:
    run_dir = place.folder / "run"
    run_dir.mkdir(parents=True)
    config = sections(place, run_dir, "adapter", place.dtype, _ENGINE_SHARE)
    config["pipeline"] |= {"gpu": "turns"}
    path = run_dir / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    producer = "tests.integration.turns_producer" if place.on_cpu else "producer.app.cli"
    run_pair(run_dir, ["--config", str(path)], [place.gpu, place.gpu], "turns", producer)
    spent_s = json.loads((run_dir / "trainer.json").read_text(encoding="utf-8"))["gpu_turn_s"]
    steps = RunReader(run_dir).lines(STEPS)
    yield {
        "what": "steps",
        "steps": len(steps),
        "step_s": statistics.median(step["step_s"] for step in steps),
        "wait_s": statistics.median(step["wait_s"] for step in steps),
        "reward_first": steps[0]["reward"],
        "reward_last": steps[-1]["reward"],
    }
    yield {"what": "seconds of the GPU", **spent_s}
