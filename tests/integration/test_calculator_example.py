"""`python -m examples.calculator.demo` teaches a model to use a tool, with records that are exact to the token."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replay.groups import GroupShape, RolloutGroup
from replay.journal_reader import JournalReader
from tests.integration.models import reference_logprobs

STEPS = 10


def groups_of(run_dir: Path) -> list[RolloutGroup]:
    shape = GroupShape(num_generations=8, num_rewards=1, max_completion_length=32, vocab_size=64)
    reader = JournalReader(run_dir / "journal.sqlite")
    try:
        return [shape.load(body) for row in reader.rows() if (body := reader.body(row)) is not None]
    finally:
        reader.close()


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_demo_learns_to_use_the_calculator(short_dir: Path) -> None:
    run_dir = short_dir / "run"
    command = [sys.executable, "-m", "examples.calculator.demo", "--run-dir", str(run_dir), "--steps", str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["alone_before"] < 0.05
    assert summary["eval_before"] < 0.2
    assert summary["eval_after"] > 0.7
    assert summary["reward_last"] > summary["reward_first"] + 0.3

    used_the_tool = 0
    for group in [group for group in groups_of(run_dir) if group.newest_version == 0][:4]:
        for tokens in group.records:
            sampled, ids = group.is_sampled[tokens], group.completion_ids[tokens].tolist()
            expected = reference_logprobs(run_dir / "base", None, group.prompt_ids.tolist(), ids, 1.0).numpy()
            np.testing.assert_allclose(group.logprobs[tokens][sampled], expected[sampled], atol=1e-3)
            used_the_tool += not sampled.all()
    assert used_the_tool > 2
