"""The GSM8K example's own configuration and task file, on local rows and a small model."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from examples.gsm8k.make_rows import rows
from examples.gsm8k.task import to_prompt
from protocol.config.functions import make_plugin
from protocol.runtime.json_lines import read
from tests.integration.examples import run_example, word_model


def test_rows_become_chat_prompts_with_the_bare_answer() -> None:
    row = to_prompt({"question": "How many?", "answer": "First 1,000.\n#### 1,250"})
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["answer"] == "1,250"


def test_made_rows_are_right_and_have_the_schema() -> None:
    made = rows(200, seed=3)
    assert made == rows(200, seed=3)
    for row in made:
        steps, _, answer = row["answer"].partition("\n#### ")
        *_, last = re.findall(r"<<(\d+)([-+*])(\d+)=(\d+)>>", steps)
        left, sign, right, result = last
        assert {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign] == int(
            result
        )
        assert int(answer) == int(result) >= 0
        assert row["question"].endswith("?")


def test_rewards_by_hand() -> None:
    entries = yaml.safe_load(Path("examples/gsm8k/run.yaml").read_text())["rewards"]["functions"]
    right_answer, boxed_once = (
        make_plugin("slipstream.rewards", entry["function"], entry["options"], "rewards.functions") for entry in entries
    )
    texts = ["so \\boxed{1,250}", "\\boxed{7} then \\boxed{$1250.00}", "1250", "\\boxed{12500}\nend"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert right_answer(completions, answer=["1,250"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert boxed_once(completions) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_pair_runs_it(short_dir: Path) -> None:
    made = rows(1000)
    answers = [answer for answer, _ in Counter(row["answer"].rpartition(" ")[2] for row in made).most_common(3)]
    chosen = [row for row in made if row["answer"].rpartition(" ")[2] in answers]
    (short_dir / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    words = ["so", "it", "is", *(f"\\boxed{{{answer}}}" for answer in answers)]
    steps = run_example(
        short_dir,
        "examples/gsm8k/run.yaml",
        {
            "model.path": word_model(short_dir / "model", words),
            "dataset.path": short_dir / "gsm8k.jsonl",
            "dataset.subset": "null",
            "evaluation.dataset.path": short_dir / "gsm8k.jsonl",
            "evaluation.dataset.subset": "null",
            "evaluation.dataset.split": "train",
            "evaluation.every_versions": 2,
            "evaluation.max_prompts": 4,
            "sampling.max_completion_length": 6,
            "trainer.max_steps": 4,
        },
    )
    assert steps[-1]["step"] == 4
    assert steps[-1]["counts"]["trained"] == 8
    for name in ("right_answer", "boxed_once"):
        means = [step[f"rewards/{name}/mean"] for step in steps if f"rewards/{name}/mean" in step]
        assert 0 < sum(means) / len(means) < 1, (name, means)
    evaluations = read(short_dir / "run" / "evaluations.jsonl")
    assert [line["num_prompts"] for line in evaluations] == [4] * len(evaluations)
    evaluated = [line["version"] for line in evaluations]
    assert evaluated in ([0, 2, 4], [0, 4]), "while v0 is evaluated v4 may take the place of v2"
