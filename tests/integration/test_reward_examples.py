"""The examples of code rewards and of a reward model, with the real pair, the real sandbox and a real checkpoint."""

import math
from pathlib import Path

import pytest

from examples.code.task import to_prompt
from tests.integration.examples import run_example, word_model
from tests.integration.models import build_model
from tests.integration.warm import run_to_its_end

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.usefixtures("bubblewrap")
def test_code_is_run_and_scored(short_dir: Path) -> None:
    assert to_prompt({"problem": "p", "tests": ["pass"]})["tests"] == ["pass"]
    steps = run_example(
        short_dir,
        "examples/code/run.yaml",
        {
            "model.path": word_model(short_dir / "model", ["1", "+", "x", "(", "None"]),
            "sampling.max_completion_length": 3,
        },
    )
    means = [step["rewards/code/mean"] for step in steps if "rewards/code/mean" in step]
    assert 0 < sum(means) / len(means) < 1, means  # of a third: "1 + 1" runs, "x (" does not
    assert "sandbox" not in (short_dir / "producer.log").read_text()


def test_a_reward_model_scores_sums(short_dir: Path) -> None:
    judge = short_dir / "judge"
    run_to_its_end("examples.reward_model.build_judge", [str(judge), "--steps", "5"], short_dir / "judge.log", 100)
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(10, 14) for b in range(20, 24)]
    (short_dir / "sums.jsonl").write_text("".join(rows))
    steps = run_example(
        short_dir,
        "examples/reward_model/run.yaml",
        {
            "rewards.functions": f'[{{model: "{judge}"}}, {{function: exact_match, weight: 0.0}}]',
            "model.path": build_model("qwen2", short_dir / "model"),
            "dataset.path": short_dir / "sums.jsonl",
            "engine.max_model_len": 64,
        },
    )
    means = [step["rewards/judge/mean"] for step in steps if "rewards/judge/mean" in step]
    assert all(math.isfinite(mean) for mean in means)
    assert len(set(means)) == len(means) == 2
