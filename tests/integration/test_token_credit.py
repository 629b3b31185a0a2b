"""Runs in which more than the rewards of completions teaches: rewards of spans, and teachers alone."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from protocol.wire.messages import Group, Lease
from replay.advantages import EPSILON
from slipstream.cli import run as slipstream
from slipstream_extras.view.server.app import application
from slipstream_extras.view.server.viewer import Viewer
from tests.scripted import made_up_group

from .pair import Daemon, end_well
from .runs import Run
from .test_pair import read_steps, write_run

pytestmark = pytest.mark.integration

REWARD = """
def steps(completion_ids, **_):
    return [{"tokens": [(2, 1.0 - k), (4, 3.0 - 3 * k)]} for k in range(len(completion_ids))]
"""


def group_page(run_dir: Path, group: str, colour: str) -> str:
    client = TestClient(application(Viewer(run_dir), "t" * 43), "http://127.0.0.1:8000")
    client.get(f"/?token={'t' * 43}", follow_redirects=False)
    answer = client.get("/group", params={"id": group, "colour": colour})
    assert answer.status_code == 200, answer.text
    return answer.text


def exported(run_dir: Path, to: Path) -> list[dict[str, Any]]:
    assert slipstream(["journal", "--run", str(run_dir), "export", "--state", "trained", "--to", str(to)]) == 0
    return [json.loads(line) for line in to.read_text().splitlines()]


def test_rewards_of_spans_are_trained_as_by_hand(short_dir: Path, daemons: list[Daemon]) -> None:
    config = write_run(
        short_dir, "qwen2", [{"prompt": f"{i}+1="} for i in range(20)], REWARD,
        rewards={"credit": "per_step", "gamma": 0.5, "outcome_weight": 0.25},
        sampling={"num_generations": 2}, pipeline={"groups_per_step": 2}, correction={"preset": "none"},
        trainer={"max_steps": 2, "save_steps": 2, "loss_type": "dapo"},
    )  # fmt: skip
    for module, name in (("tests.integration.spans_producer", "producer"), ("consumer.app.cli", "trainer")):
        daemons.append(Daemon(module, short_dir / f"{name}.log", "--config", str(config)))
    end_well(daemons[1], daemons[0])

    # Rewards 1, 3 and 0, 0: mean 1, deviations 0, 2, -1, -1, variance 6 / 3. Outcomes 4 and 0: deviations 2 and -2, variance 8.
    # From its span on a token has 0 + 0.5 · 2, 2 and -1 - 0.5 · 1, -1.
    returns = ((2, 1.0), (2, 2.0), (-2, -1.5), (-2, -1.0))
    advantages = [
        0.25 * outcome / (math.sqrt(8) + EPSILON) + own / (math.sqrt(2) + EPSILON) for outcome, own in returns
    ]
    first, second = read_steps(short_dir)
    # Ratios are 1, so the loss is minus the mean of the advantages, of two tokens each.
    assert (first["loss"], second["loss"]) == (pytest.approx(-np.mean(advantages), abs=1e-6),) * 2
    assert first["grad_norm"] > 0
    assert (first["reward"], first["spans/share"], first["spans/reward"]) == (2.0, 1.0, 1.0)
    assert first["spans/reward_std"] == pytest.approx(np.std([1, 3, 0, 0] * 2, ddof=1))

    groups = exported(short_dir / "run", short_dir / "trained.jsonl")
    assert len(groups) == 4
    for group in groups:
        assert (group["credit"], group["span_ends"]) == ([[0, 1, 0, 3], [0] * 4], [[False, True, False, True]] * 2)
        page = group_page(short_dir / "run", group["lease_id"], "advantage")
        shown = list(map(float, re.findall(r"advantage ([+-]\d+\.\d{4})", page)))
        assert sorted(shown) == pytest.approx(sorted(2 * advantages), abs=5e-5), "of each sampled token"


def test_teachers_alone_need_no_reward_function(start: Any) -> None:
    def taught(lease: Lease, version: int) -> Group:
        group = made_up_group(lease, version, rewards=[])
        logprobs = np.frombuffer(group.logprobs, "<f4")
        return msgspec.structs.replace(group, teacher_logprobs=(logprobs - 0.25).astype("<f4").tobytes())

    run: Run = start(
        rewards={"functions": []}, pipeline={"max_staleness": 0}, trainer={"max_steps": 2}, replay={"mode": "signal"},
        teachers=[{"name": "big", "url": "http://127.0.0.1:9"}], distillation={"mode": "advantage", "alone": True},
    )  # fmt: skip
    run.producer(changes={"reward_names": []}, answer=taught)
    trainer = run.trainer()
    assert trainer.end() == 0, trainer.last_words
    assert run.column("distillation/logprob_gain") == pytest.approx([-0.25] * 2)
    assert all(norm > 0 for norm in run.column("grad_norm"))
    run_dir = Path(run.config.run_dir)
    for group in exported(run_dir, run.folder / "trained.jsonl"):
        assert (group["reward_names"], group["rewards"]) == ([], [[]] * 4)
        assert "None" not in group_page(run_dir, group["lease_id"], "logprob")
    for command in (["status", "--once", "--run", str(run_dir)], ["journal", "--run", str(run_dir), "lineage", "1"]):
        assert slipstream(command) in (0, 68)
