"""A run with two environments and single turns: both daemons are real, vLLM is scripted, and one environment hangs."""

import json
import math
from pathlib import Path

import pytest

from slipstream.cli import run as slipstream

from .pair import Daemon, end_well
from .test_pair import read_steps, write_run

pytestmark = pytest.mark.integration

CODE = """
import itertools, time

def count(completions, environment, **_):
    assert set(environment) == {"single_turn"}
    return [float(k) for k in range(len(completions))]

class Dice:
    rolls = itertools.count()

    def reset(self, environment, **_):
        assert environment == "dice"

    def get_reward(self):
        return float(next(self.rolls) % 2)

class Hangs:
    def reset(self, **_):
        time.sleep(600)

    def get_reward(self):
        return 1.0
"""


def row(name: str | None, number: int) -> dict[str, object]:
    return {"prompt": [{"role": "user", "content": f"{number}+1="}], "environment": name}


def test_each_row_is_played_by_its_environment_and_one_that_hangs_stops_no_other(
    short_dir: Path, daemons: list[Daemon]
) -> None:
    rows = [row(name, number) for number in range(10) for name in ("dice", "hangs", None)]
    place = f"{short_dir}/rewards.py"
    limits = {"reward_weight": 0.5, "max_turns": 1, "max_concurrent": 1, "call_timeout_s": 1.0}
    config = write_run(
        short_dir, "qwen2", rows, CODE, sampling={"num_generations": 2},
        pipeline={"groups_per_step": 2}, trainer={"max_steps": 4, "save_steps": 4},
        rewards={"functions": [{"function": f"{place}:count", "environments": ["single_turn"]}]},
        environments=[
            {"name": "dice", "factory": f"{place}:Dice"} | limits,
            {"name": "hangs", "factory": f"{place}:Hangs"} | limits,
        ],
    )  # fmt: skip
    (short_dir / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    for module, name in (("tests.integration.spans_producer", "producer"), ("consumer.app.cli", "trainer")):
        daemons.append(Daemon(module, short_dir / f"{name}.log", "--config", str(config)))
    end_well(daemons[1], daemons[0])

    assert len(read_steps(short_dir)) == 4
    trained = short_dir / "trained.jsonl"
    arguments = ["journal", "--run", str(short_dir / "run"), "export", "--state", "trained", "--to", str(trained)]
    assert slipstream(arguments) == 0
    found: dict[str, list[list[float]]] = {"dice": [], "hangs": [], "single_turn": []}
    for group in map(json.loads, trained.read_text().splitlines()):
        assert group["reward_names"] == ["count", "dice", "hangs"]
        rewards = [[math.nan if each is None else each for each in row] for row in group["rewards"]]
        scored = [
            name for name, worth in zip(("single_turn", "dice", "hangs"), rewards[0], strict=True) if worth == worth
        ]
        assert len(scored) == 1, "rows of others are missing"
        found[scored[0]].append([row[("single_turn", "dice", "hangs").index(scored[0])] for row in rewards])
    assert found["hangs"] == []
    assert {tuple(group) for group in found["single_turn"]} == {(0.0, 1.0)}
    assert {tuple(sorted(group)) for group in found["dice"]} == {(0.0, 1.0)}
