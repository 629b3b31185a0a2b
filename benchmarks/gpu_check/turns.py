"""Both daemons on one GPU in turns (`pipeline.gpu: turns`), each with most of the memory: what a change of sides takes.

On a CPU, where vLLM cannot sleep, the engine is a scripted one, and what runs is the taking of turns alone.
"""

import asyncio
import json
import statistics
import sys

import yaml

from benchmarks.gpu_check.model import sections
from benchmarks.gpu_check.place import Findings, Place
from slipstream.pair import Pair
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
    settings = ["--config", str(path), "--gpu", place.gpu]
    trainer, other = ([sys.executable, "-m", module, *settings] for module in ("consumer.app.cli", producer))
    if code := asyncio.run(Pair(trainer, other, lambda name, line: print(f"{name:<8} | {line}", flush=True)).run()):
        raise SystemExit(f"the pair failed with exit code {code}")
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
