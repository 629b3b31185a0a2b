"""What becomes of a row that an agent of NeMo Gym is asked to do, whatever it answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from producer.environments import task_loop as http_client
from producer.environments.program import ProblemError, row_of
from producer.environments.task_loop import finite
from slipstream_extras.environments.nemo_gym import load
from tests.nemo_gym_servers import Row, agent_server, refusal_of_the_policy, verified

ROW: Row = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "double 2"}],
        "temperature": 0.1,
        "top_p": 0.9,
        "max_output_tokens": 5,
        "model": "other",
        "tools": [{"type": "function", "name": "look"}],
        "metadata": {"level": "3"},
    },
    "expected": 4,
    "agent_ref": {"name": "doubling"},
}


def played(url: str, row: Row = ROW, timeout_s: float = 10.0) -> dict[str, Any]:
    agent = load({"kind": "play", "url": url, "episode_timeout_s": timeout_s, "max_concurrent": 2})

    async def body() -> dict[str, Any]:
        async with agent.playing("", ""):
            return dict(await agent.play({"columns": {"task": json.dumps(row)}}, "lease-7.1"))

    return asyncio.run(body())


def test_a_row_goes_as_it_is_but_names_its_episode_and_says_nothing_of_sampling():
    asked: list[Row] = []

    def answer(row: Row):
        asked.append(row)
        return verified(row, 0.5, steps=3, passed=True, note="good")

    with agent_server(answer) as url:
        found = played(url)
    assert found == {"environment": 0.5, "reward": 0.5, "steps": 3, "passed": True, "expected": 4}
    create_params = {name: ROW["responses_create_params"][name] for name in ("input", "tools")}
    assert asked == [
        ROW | {"responses_create_params": create_params | {"metadata": {"level": "3", "episode": "lease-7.1"}}}
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, {}, b"x" * 600), r"/run: status 500: x{500}$"),
        (
            refusal_of_the_policy('{"error":{"message":"not served: store; remove it"}}'),
            """: b'"Hit an exception in VLLMModel.* server: b'{"error":{"message":"not served: store; remove it"}}'""",
        ),
        ((302, {"location": "http://127.0.0.1:9/"}, b""), "/run: status 302"),
        ((200, {}, b"never"), "/run answered with no JSON"),
        ((200, {"content-length": "9"}, b'{"a": 1'), "/run ended its answer 2 bytes early"),
        ((200, {}, b"[1]"), "/run answered without a number as `reward`"),
        ((200, {}, b'{"reward": "1"}'), "/run answered without a number as `reward`"),
        ((200, {}, b'{"reward": 1, "a": "' + b"x" * 5000 + b'"}'), "/run answered with more than 4096 bytes"),
    ],
)
def test_a_wrong_answer_fails_the_episode_and_says_what_was_wrong(
    answer: tuple[int, dict[str, str], bytes], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_client, "_LONGEST_ANSWER_BYTES", 4096)
    with agent_server(lambda _: answer) as url, pytest.raises((RuntimeError, OSError), match=said):
        played(url)


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_without_an_end_is_left_at_the_episodes_time_limit(status: int):
    silent = (status, {"content-length": "100"}, b'{"reward"')
    with agent_server(lambda _: silent) as url, pytest.raises(OSError, match=r"early|timed out|within"):
        played(url, timeout_s=0.2)


@pytest.mark.parametrize(
    ("value", "posted"),
    [(1, 1.0), (True, 1.0), (None, None), (float("nan"), None), (10**400, None), (1e31, None), ("good", None)],
)
def test_what_is_no_finite_reward_is_missing(value: Any, posted: float | None):
    assert finite(value) == posted


def test_a_row_that_rl_environment_did_not_write_is_named():
    for columns in ({}, {"task": 3}, {"task": "double 2"}, {"task": "[]"}):
        with pytest.raises(
            ProblemError, match="no `task` of an environment; make the dataset with `slipstream environment rows`"
        ):
            row_of({"columns": columns})


def test_an_agent_that_is_not_there_is_named():
    with agent_server(lambda row: verified(row, 1.0)) as url:
        pass
    with pytest.raises(ProblemError, match=rf"environment\.options\.url: nothing answers at {url}.*start NeMo Gym"):
        played(url)


def rows(file: Path) -> list[dict[str, Any]]:
    settings = {"kind": "rows", "source": str(file), "url": "", "episode_timeout_s": 1.0, "max_concurrent": 1}
    return list(load(settings).rows(None))


def test_rows_are_those_of_the_agents_file(tmp_path: Path):
    parts = [{"type": "input_text", "text": "a"}, 3, {"type": "input_text", "text": "b"}]
    lines = [
        json.dumps(ROW),
        "",
        '{"responses_create_params": {"input": "hello"}}',
        json.dumps(
            {"responses_create_params": {"input": [{"role": "system", "content": parts}, {"type": "reasoning"}]}}
        ),
        '{"responses_create_params": {"input": []}, "task_idx": 3}',  # of an agent that asks its environment
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    found = rows(file)
    assert [row["prompt"] for row in found] == [
        [{"role": "user", "content": "double 2"}],
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "ab"}],
        [{"role": "user", "content": ""}],
    ]
    assert [json.loads(row["task"]) for row in found] == [json.loads(line) for line in lines if line]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "--from .*: No such file"),
        (b"\xff\xfe", "--from .*: not UTF-8"),
        (b"{}\n", r"rows\.jsonl:1: a row of an agent is a JSON object with responses_create_params\.input"),
        (b'{"responses_create_params": {"input": 3}}', r"rows\.jsonl:1: responses_create_params\.input has no message"),
        (b"\n[", r"rows\.jsonl:2: a row of an agent is a JSON object"),
    ],
)
def test_a_file_that_has_no_rows_of_an_agent_is_refused(content: bytes | None, said: str, tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ProblemError, match=said):
        rows(file)
