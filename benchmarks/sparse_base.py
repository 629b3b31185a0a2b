"""The base model of `benchmarks.sparse`: the arithmetic example's, made so careless that it hardly ever carries.

Guarantee: the folder appears complete or not at all, and is built again when what builds it has changed. Its prompts
are the example's sums that need a carry, so no sum can be right by habit; held-out sums are in neither corpus nor
prompts. Only a few of the prompts, drawn at random, are kept, so that a run goes over them several times.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.arithmetic.demo import build_once

_SCRIPTS = (Path("examples/arithmetic/build_model.py"), Path(__file__))


def build(folder: Path, *, careless: float, steps: int, num_prompts: int) -> None:
    """Builds the model in `folder`, unless it is there.

    Args:
        careless: share of the corpus's carries that are forgotten.
        steps: of pre-training.
        num_prompts: to train on.
    """
    settings = ["--careless", str(careless), "--steps", str(steps)]
    command = [sys.executable, "-m", "examples.arithmetic.build_model", *settings]

    def fill(partial: Path) -> None:
        subprocess.run([*command, str(partial)], check=True)
        for name, kept in (("train", num_prompts), ("eval", None)):
            file = partial / f"{name}.jsonl"
            rows = [row for row in read_rows(file) if needs_carry(row["prompt"])]
            random.Random(0).shuffle(rows)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows[:kept]), encoding="utf-8")

    recipe = " ".join([*settings, str(num_prompts)]).encode()
    build_once(folder, b"".join(script.read_bytes() for script in _SCRIPTS) + recipe, fill)


def needs_carry(prompt: str) -> bool:
    """Whether the ones of "37+45=" add up to ten or more."""
    first, second = prompt.removesuffix("=").split("+")
    return int(first[-1]) + int(second[-1]) >= 10


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
