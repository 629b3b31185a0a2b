"""A simulated user against a stand-in of a model's server: what it is asked, and what its failures cost."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from producer.environments.contract import OutageError
from producer.environments.worker import Call, Environment
from protocol.config.rewards import EnvironmentSection
from slipstream_extras.environments.simulated_user import SimulatedUser
from tests.unit.producer.loop import asynchronous

PROMPT = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hi"}]
OPTIONS = {"url": "http://127.0.0.1:9", "model": "big", "prompt": "You want {goal}.", "stop": "BYE"}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_extras.environments.simulated_user.pause_s", lambda _: 0.0)


@asynccontextmanager
async def talking(*answers: Any, **options: Any) -> AsyncIterator[tuple[SimulatedUser, list[dict[str, Any]]]]:
    """A user whose server gives these answers in turn: text, or status and JSON. What it was asked is kept."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json() | {"key": request.headers.get("Authorization")})
        found = answers[len(asked) - 1]
        if found is None:
            await asyncio.sleep(1.5)
        if isinstance(found, str):
            found = (200, {"choices": [{"message": {"role": "assistant", "content": found}}]})
        return web.Response(status=found[0], body=json.dumps(found[1]).encode())

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    async with TestServer(app) as server:
        user = SimulatedUser(**OPTIONS | {"url": str(server.make_url(""))} | options)
        try:
            yield user, asked
        finally:
            if user._session is not None:
                await user._session.close()


@asynchronous
async def test_it_answers_with_the_roles_exchanged_until_it_says_the_word(tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    async with talking("a cat", "fine, BYE", "two", key_file=str(key)) as (user, asked):
        user.reset(prompt=PROMPT, goal="a pet")
        assert await user.reply("What?") == "a cat"
        assert await user.reply("Here.") is None
        assert asked[1] == {
            "model": "big",
            "max_tokens": 512,
            "key": "Bearer secret",
            "messages": [
                {"role": "system", "content": "You want a pet."},
                {"role": "assistant", "content": "Hi"},
                {"role": "user", "content": "What?"},
                {"role": "assistant", "content": "a cat"},
                {"role": "user", "content": "Here."},
            ],
        }
        user.reset(prompt=PROMPT, goal="two")
        assert await user.reply("Well?") == "two"
        assert len(asked[2]["messages"]) == 3, "the next episode begins anew"


@asynchronous
async def test_a_busy_or_failing_server_is_asked_again() -> None:
    async with talking((503, {}), (500, {}), (429, {}), "ok") as (user, asked):
        user.reset(prompt=PROMPT, goal="x")
        assert await user.reply("?") == "ok"
        assert len(asked) == 4


@pytest.mark.parametrize(
    ("answer", "tries", "kind"),
    [
        ((500, {}), 2, OutageError),
        ((400, {"error": {"message": "too long"}}), 1, RuntimeError),
        ((401, {}), 1, OutageError),
        ((404, {"error": {"message": "no such model"}}), 1, OutageError),
        ((200, {"choices": []}), 1, OutageError),
        ((200, {"choices": [{"message": {"content": None}}]}), 1, OutageError),
        ((200, {"choices": [{"message": {"content": ""}}]}), 1, OutageError),
        ((200, ["?"]), 1, OutageError),
    ],
)
@asynchronous
async def test_a_server_that_fails_is_no_user(answer: Any, tries: int, kind: type[Exception]) -> None:
    async with talking(answer, answer, retries=1) as (user, asked):
        user.reset(prompt=PROMPT, goal="x")
        with pytest.raises(kind, match="the user at http"):
            await user.reply("?")
        assert len(asked) == tries


@asynchronous
async def test_a_server_that_is_gone_or_hangs_is_an_outage() -> None:
    user = SimulatedUser(**OPTIONS | {"retries": 1})
    user.reset(prompt=PROMPT, goal="x")
    with pytest.raises(OutageError, match="cannot be reached"):
        await user.reply("?")
    assert user._session is not None
    await user._session.close()
    async with talking(None, timeout_s=1.0) as (user, asked):
        user.reset(prompt=PROMPT, goal="x")
        with pytest.raises(OutageError, match="the user at http"):
            await user.reply("?")
        assert len(asked) == 1


def test_an_answer_has_to_be_limited_before_the_call_is() -> None:
    section: dict[str, Any] = {"factory": "simulated_user", "options": OPTIONS}
    assert EnvironmentSection.model_validate(section).call_timeout_s == 30.0
    for changes in ({"call_timeout_s": 20.0}, {"options": OPTIONS | {"timeout_s": 30}}):
        with pytest.raises(ValueError, match=r"options\.timeout_s"):
            EnvironmentSection.model_validate(section | changes)


def test_it_is_an_environment_without_tools_and_a_row_without_its_column_is_refused() -> None:
    environment = Environment("simulated_user", OPTIONS)
    assert environment.answer(Call("describe")).value == [[], False, False, True]
    assert "nothing as 'goal'" in environment.answer(Call("reset", arguments={"prompt": PROMPT})).problem
    empty = Call("reset", arguments={"prompt": PROMPT, "goal": ""})
    assert "nothing as 'goal'" in environment.answer(empty).problem
    listed = Call("reset", arguments={"prompt": PROMPT, "goal": ["a pet"]})
    assert "column 'goal' has ['a pet']" in environment.answer(listed).problem


@pytest.mark.parametrize(
    "options",
    [{"url": "http://a/v1"}, {"url": "a"}, {"prompt": "{a.b}"}, {"prompt": ""}, {"retries": -1}, {"word": 1}],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="options"):
        EnvironmentSection.model_validate({"factory": "simulated_user", "options": OPTIONS | options})
