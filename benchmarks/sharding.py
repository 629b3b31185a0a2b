"""`make bench-ranks`, second part: memory of a rank whose base is whole, and of one that shares it with another, on the CPU.

Guarantee: both take the same steps; loss and gradient are compared before anything else is. Memory is what is resident above what
the process had before it loaded the model, between steps and at the peak of one. The files of the base are bfloat16 and it
computes in float32, because a base that needs no conversion is only mapped: its pages are those of the files, which all ranks
share. Memory that is freed goes back to the system at once here, so that what is kept for later is not taken for needed.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.ranks import COMPARED, SIZE, Arm, check_equal

BASE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 1024, "dtype": "float32"}  # fmt: skip
FEW_TOKENS = {
    "num_prompts": 1,
    "prompt_tokens": 32,
    "median_tokens": 16,
    "max_tokens": 32,
    "tokens_per_micro_batch": 64,
}
_MEASURED = {"model_mb": "MB between steps", "model_peak_mb": "MB at the peak", "wall_s": "s a step"}
_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**15), "MALLOC_TRIM_THRESHOLD_": str(2**15), "MALLOC_ARENA_MAX": "1"}


def measure(world: int, size: dict[str, Any], repetitions: int) -> dict[str, Any]:
    """Of each way the parameters, loss and norm of the gradient, and the medians of what is measured but for the first step."""
    os.environ.update(_GIVEN_BACK)
    found = {}
    for choice in ("none", "layers"):
        with tempfile.TemporaryDirectory(prefix="bench-sharding-") as folder:
            arm = Arm("ours", world, size | {"shard_base": choice, "dtype_of_file": "bfloat16"}, Path(folder))
            try:
                parameters = arm.answers()[0]["parameters"]
                steps = [arm.ask("step") for _ in range(1 + repetitions)][1:]
            finally:
                arm.close()
        found[choice] = {
            "parameters": parameters,
            **{name: steps[0][0][name] for name in COMPARED},
            **{name: statistics.median(max(rank[name] for rank in step) for step in steps) for name in _MEASURED},
        }
    whole, layers = found["none"], found["layers"]
    check_equal("bench-sharding", whole, layers)
    return found | {"ratios": {name: layers[name] / whole[name] for name in _MEASURED}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/sharding.json"), help="JSON file to write")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="steps of each way (default: %(default)s)")
    parser.add_argument("--size", type=json.loads, default={}, help="JSON that replaces parts of the size")
    arguments = parser.parse_args()
    size = SIZE | {"model": BASE} | FEW_TOKENS | arguments.size
    report = measure(arguments.ranks, size, arguments.repetitions)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"base of {report['none']['parameters'] * 4 / 1e6:.0f} MB, {arguments.ranks} ranks")
    for name, text in _MEASURED.items():
        whole, layers = report["none"][name], report["layers"][name]
        print(f"{text:20}whole on each {whole:8.1f}, shared {layers:8.1f}, ratio {report['ratios'][name]:.2f}")


if __name__ == "__main__":
    main()
