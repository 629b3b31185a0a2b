"""Reward services: their headers, whose values are secrets that somebody wrote with an editor, their times and their answers."""

import asyncio
import json
import math
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai.types.responses import Response

from producer.rewards.http_reward import HttpReward
from producer.rewards.messages import Job
from producer.rewards.nemo_gym import NemoGymReward
from producer.rewards.services import sources_of
from protocol.config.reward_options import RewardService
from protocol.config.rewards import RewardsSection
from protocol.errors import ConfigError
from tests.unit.producer.loop import asynchronous

NOWHERE = "http://127.0.0.1:9/judge"


def judge() -> HttpReward:
    return HttpReward("judge", NOWHERE, RewardService(headers_env={"Authorization": "JUDGE_TOKEN"}))


@asynchronous
async def test_a_newline_at_the_end_of_a_secret_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "Bearer secret\r\n")
    service = judge()
    assert service._headers["Authorization"] == "Bearer secret"
    scores = await service.ask(Job("p", ["a"], [[1]], {}), 5.0)  # aiohttp raises a ValueError for a line break
    await service.close()
    assert (scores.rewards, scores.reason) == (None, "unavailable")


@pytest.mark.parametrize(("value", "said"), [(b"sec\x1bret", "does not print"), (b"sec\xffret", "not text in UTF-8")])
def test_what_no_header_can_hold_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, value: bytes, said: str
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", value.decode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=f"environment variable JUDGE_TOKEN, header Authorization: .*{said}"):
        judge()


@pytest.mark.parametrize("name", ["", "Two words", "Line\nbreak", "Größe"])
def test_names_of_headers(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a header"):
        RewardService(headers_env={name: "JUDGE_TOKEN"})


@asynchronous
async def test_an_answer_without_end_of_its_nesting_is_a_missing_reward() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b'{"rewards": [1.0], "detail": ' + b"[" * 100_000)

    app = web.Application()
    app.router.add_post("/judge", answer)
    async with TestServer(app) as server:
        service = HttpReward("judge", str(server.make_url("/judge")), RewardService())
        scores = await service.ask(Job("prompt", ["completion"], [[1]], {}), 10.0)
        await service.close()
    assert scores.rewards is None
    assert scores.reason == "invalid"


@asynchronous
async def test_a_service_has_the_time_that_it_was_given_and_not_what_its_client_thinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.02))

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.json_response({"rewards": [1.0]})

    app = web.Application()
    app.router.add_post("/judge", answer)
    async with TestServer(app) as server:
        service = HttpReward("judge", str(server.make_url("/judge")), RewardService())
        scores = await service.ask(Job("prompt", ["completion"], [[1]], {}), 10.0)
        late = await service.ask(Job("prompt", ["completion"], [[1]], {}), 0.01)
        await service.close()
    assert scores.rewards == [1.0]
    assert (late.rewards, late.reason) == (None, "timeout")


@asynchronous
async def test_a_group_that_cannot_be_sent_is_a_missing_reward() -> None:
    service = HttpReward("judge", NOWHERE, RewardService())
    scores = await service.ask(Job("p", ["half a character \ud800"], [[1]], {}), 5.0)
    await service.close()
    assert (scores.rewards, scores.reason, scores.is_final) == (None, "invalid", True)


TURNS = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "name": "add", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize("as_task", [True, False], ids=["column task", "columns"])
@asynchronous
async def test_a_resources_server_of_nemo_gym_scores_each_completion(as_task: bool) -> None:
    """The completions have the form of OpenAI's client, whose types NeMo Gym extends."""
    asked = list[Any]()
    row = {"expected_answer": "B", "responses_create_params": {"input": [{"role": "user", "content": "A or B?"}]}}

    async def verify(request: web.Request) -> web.Response:
        asked.append(await request.json())
        response = Response.model_validate(asked[-1]["response"])
        match response.output_text:
            case "broken":
                return web.Response(status=500, text="no judge")
            case "odd":
                return web.json_response({"score": 1.0})
            case "masked":
                return web.json_response({"reward": 0.0, "mask_sample": True})
        return web.json_response(asked[-1] | {"reward": float(response.output_text == "B"), "extracted": "B"})

    app = web.Application()
    app.router.add_post("/verify", verify)
    said = [[{"role": "assistant", "content": text}] for text in ("B", "broken", "odd", "masked")]
    columns = {"task": json.dumps(row)} if as_task else row
    async with TestServer(app) as server:
        settings = RewardService(nemo_gym=True)
        service = NemoGymReward("judge", str(server.make_url("/verify")), settings)
        scores = await service.ask(Job("A or B?", [*said, TURNS], [[1]] * 5, columns), 10.0)
        none = await service.ask(Job("p", ["broken"] * 2, [[1]] * 2, {}), 10.0)
        strange = await service.ask(Job("p", ["B"], [[1]], {"task": "[1"}), 10.0)
        await service.close()
    assert scores.rewards == pytest.approx([1.0, math.nan, math.nan, math.nan, 0.0], nan_ok=True)
    assert {row: reason for row, (reason, _) in scores.failed.items()} == {1: "raised", 2: "raised"}
    assert "no judge" in scores.failed[1][1]
    assert all(each | row == each for each in asked[:5])
    turns = next(each["response"]["output"] for each in asked if len(each["response"]["output"]) > 1)
    assert [item["type"] for item in turns] == ["function_call", "function_call_output", "message"]
    assert asked[5]["responses_create_params"] == {"input": [{"role": "user", "content": "p"}]}
    assert (none.rewards, none.reason) == (None, "unavailable")
    assert (strange.rewards, strange.reason, strange.is_final) == (None, "invalid", True)


def test_a_section_with_a_resources_server_asks_it() -> None:
    entry = {"url": "http://127.0.0.1:9/verify", "options": {"nemo_gym": True}}
    section = RewardsSection.model_validate({"functions": [entry]})
    assert [type(source) for source in sources_of(section)] == [NemoGymReward]
    with pytest.raises(ValueError, match="nemo_gym scores completions"):
        RewardsSection.model_validate({"functions": [entry | {"options": {"nemo_gym": True, "steps": "."}}]})
