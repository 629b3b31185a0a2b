"""The headers of a reward service, whose values are secrets that somebody wrote with an editor."""

import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from producer.rewards.services import HttpReward
from producer.rewards.worker import Job
from protocol.config.reward_options import RewardService
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
