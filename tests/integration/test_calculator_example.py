"""`python -m examples.calculator.demo` teaches a model to use a tool, with records that are exact to the token."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from replay.groups import GroupShape, RolloutGroup
from slipstream.run_reader import EVALUATIONS, RunReader
from tests.integration.models import reference_logprobs
from tests.integration.warm_commands import WarmCommands

STEPS = 12


def client_of(run_dir: Path, timeout_s: float = 120.0, has_ended: Callable[[], bool] = lambda: False) -> openai.OpenAI:
    """A client of the producer whose address is written there, by then or before the run has ended."""
    deadline = time.monotonic() + timeout_s
    while not (files := list((run_dir / "serve").glob("rl-producer-*.json"))):
        assert not has_ended(), "it ended before it served"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    address = json.loads(files[0].read_text())[0]["targets"][0]
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)


def groups_of(run_dir: Path) -> list[RolloutGroup]:
    shape = GroupShape(num_generations=8, num_rewards=1, max_completion_length=32, vocab_size=64)
    with closing(RunReader(run_dir).journal()) as reader:
        return [shape.load(body) for row in reader.rows() if (body := reader.body(row)) is not None]


def asks_with_tools_and_gets_calls(run_dir: Path, demo: "subprocess.Popen[bytes]") -> None:
    """An OpenAI client of the run's endpoint, while the run learns. Before that the demo trains its base model."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "multiply", "parameters": parameters}}
    served = client_of(run_dir, 240, lambda: demo.poll() is not None)
    with served.with_options(max_retries=30) as client:  # at first there is no policy
        answer = client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "47*86="}],
            tools=[tool],
            n=32,
            max_tokens=24,
            temperature=1.0,
        )
    called = [choice for choice in answer.choices if choice.message.tool_calls]
    assert called, [choice.message.content for choice in answer.choices]
    assert {choice.finish_reason for choice in called} == {"tool_calls"}
    functions = [call.function for choice in called for call in (choice.message.tool_calls or ())[:1]]
    assert {function.name for function in functions} == {"multiply"}
    assert {"a": 47, "b": 86} in [json.loads(function.arguments) for function in functions]
    assert all(choice.message.content for choice in answer.choices if not choice.message.tool_calls)


@pytest.mark.integration
@pytest.mark.timeout(540)
def test_the_demo_learns_to_use_the_calculator(short_dir: Path, warm: WarmCommands) -> None:
    run_dir = short_dir / "run"
    command = [warm.python, "-m", "examples.calculator.demo", "--run-dir", str(run_dir), "--steps", str(STEPS)]
    log = short_dir / "demo.log"
    how: Any = {"env": os.environ | warm.variables, "stderr": subprocess.STDOUT}
    with log.open("ab") as stream, subprocess.Popen(command, stdout=stream, **how) as demo:
        try:
            asks_with_tools_and_gets_calls(run_dir, demo)
            assert demo.wait(280) == 0, log.read_text()[-3000:]
        finally:
            demo.terminate()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["alone_before"] < 0.05
    assert summary["eval_before"] < 0.2
    assert summary["eval_after"] > 0.5
    assert summary["reward_last"] > summary["reward_first"] + 0.3

    # The run's own evaluation plays the same episodes in vLLM, on merged weights.
    lines = RunReader(run_dir).lines(EVALUATIONS)
    assert [(line["version"], line["num_scored"]) for line in lines] == [(0, 300), (10, 300), (STEPS, 300)]
    scores = [lines[0]["score"], lines[-1]["score"]]
    assert scores == pytest.approx([summary["eval_before"], summary["eval_after"]], abs=0.01)

    of_the_base = [group for group in groups_of(run_dir) if group.newest_version == 0]
    records = [(group, tokens) for group in of_the_base for tokens in group.records]
    with_tool = [(group, tokens) for group, tokens in records if not group.is_sampled[tokens].all()]
    assert len(with_tool) > 1
    for group, tokens in with_tool[:8] + records[:16]:
        sampled, ids = group.is_sampled[tokens], group.completion_ids[tokens].tolist()
        expected = reference_logprobs(run_dir / "base", None, group.prompt_ids.tolist(), ids, 1.0).numpy()
        np.testing.assert_allclose(group.logprobs[tokens][sampled], expected[sampled], atol=1e-3)
