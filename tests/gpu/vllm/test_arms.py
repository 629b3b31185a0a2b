"""The engines of `make gpu-check`, as far as their configuration shows."""

import json
from pathlib import Path

from benchmarks.gpu_check import engine_arm
from tests.gpu.vllm.test_engines import run


def test_arms_of_the_gpu_check_have_the_graphs_that_they_are_named_for(tmp_path: Path) -> None:
    engine_arm.build(tmp_path, on_cpu=True)
    made = json.loads(run("tests.gpu.vllm.arms", str(tmp_path)).splitlines()[-1])
    assert all(arm["counts_graphs"] for arm in made.values())
    captured = {name.removeprefix("engine-"): (arm["tokens"], arm["largest_graph"]) for name, arm in made.items()}
    of_28_november, whole = (8192, 256), (1024, 1024)
    assert {name: captured[name] for name in "ab"} == dict.fromkeys("ab", of_28_november)
    assert {name: captured[name] for name in ("d-c", *"efgh")} == dict.fromkeys(("d-c", *"efgh"), whole)
    assert [name for name, arm in made.items() if arm["specialized"]] == ["engine-f"]
