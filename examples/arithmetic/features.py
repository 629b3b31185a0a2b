"""Feature matching (EBFT, arXiv:2603.12248) on the demo's sums: no reward reads whether an answer is right.

    python -m examples.arithmetic.features [--steps 40] [--run-dir runs/features]

The reward compares states of the frozen base model behind a completion with those behind the right answer. Prints what rose on
held-out sums: the cosine with the answer's states, and the accuracy.
"""

import argparse
import json
import os
from pathlib import Path

from examples.arithmetic.demo import BASE, CONFIG, build_base_model, run_pair
from examples.folders import fresh_folder

REWARDS = [
    {"function": "feature_matching"},
    *(
        {"function": "feature_matching", "name": score, "weight": 0.0, "options": {"score": score}}
        for score in ("alignment", "diversity", "distance")
    ),
    {"function": "exact_match", "weight": 0.0},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/features"), help="replaced if a demo made it")
    arguments = parser.parse_args()
    fresh_folder(arguments.run_dir)
    build_base_model()
    from examples.arithmetic.evaluate import greedy_accuracy

    settings = {
        "run_dir": str(arguments.run_dir),
        "rewards.functions": json.dumps(REWARDS),
        "rewards.timeout_s": 60,
        "evaluation": json.dumps(
            {
                "dataset": {"path": str(BASE / "eval.jsonl")},
                "max_prompts": 200,
                "every_versions": 20,
                "metric": "alignment",
            }
        ),
        "trainer.max_steps": arguments.steps,
    }
    run_pair(["--config", CONFIG, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))])
    for line in (arguments.run_dir / "evaluations.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        print(f"version {found['version']}: held-out alignment {found['score']:.3f}")
    adapters = (None, arguments.run_dir / "adapter")
    before, after = (greedy_accuracy(BASE, BASE / "eval.jsonl", adapter) for adapter in adapters)
    print(f"held-out greedy accuracy: {before:.3f}, then {after:.3f}")


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    main()
