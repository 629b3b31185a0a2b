"""What an agent program makes of tasks, whatever its environment and its producer do."""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from producer.environments.bridges import task_loop
from producer.environments.bridges.task_loop import PolicyEndpoint, TaskLoop


class Producer:
    """Hands out tasks over HTTP, and keeps what is posted; `answers` are given first, by path."""

    def __init__(self, *tasks: dict[str, Any]) -> None:
        self.tasks = list(tasks)
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.keys: set[str] = set()

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._respond(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split()[0])
        path, body = head.split()[1].removeprefix("/v1/rollouts"), json.loads(await reader.readexactly(length))
        self.keys.add(head.partition("authorization: ")[2].partition("\r\n")[0])
        if not path:
            await asyncio.sleep(0 if self.tasks else 0.01)
            status, said = (200, self.tasks.pop(0)) if self.tasks else (204, None)
        elif self.answers.get(path):
            status, said = self.answers[path].pop(0)
        else:
            self.posted.append((path, body))
            status, said = 200, {}
        content = b"" if said is None else json.dumps(said).encode()
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n".encode())
        writer.write(content)


class Player:
    """Plays as `does` says."""

    def __init__(self, does: Callable[[str], Any]) -> None:
        self.does = does
        self.playing = self.most = 0
        self.problems: list[str] = []

    async def problem(self) -> str:
        return self.problems.pop(0) if self.problems else ""

    async def play(self, task: dict[str, Any], episode: str) -> Any:
        self.playing += 1
        self.most = max(self.most, self.playing)
        try:
            await asyncio.sleep(0.02)
            found = self.does(episode)
            return await found if asyncio.iscoroutine(found) else found
        finally:
            self.playing -= 1


def task(name: str, count: int, expires_in_s: float = 60.0) -> dict[str, Any]:
    episodes = [f"{name}.{number}" for number in range(count)]
    return {"id": name, "episodes": episodes, "rewards": ["environment", "style"], "expires_in_s": expires_in_s}


@asynccontextmanager
async def looping(producer: Producer, player: Player, max_concurrent: int = 4, timeout_s: float = 30.0):
    async with await asyncio.start_server(producer.respond, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        endpoint = PolicyEndpoint(url, "secret", max_concurrent + 1)
        working = asyncio.create_task(TaskLoop(endpoint, player, max_concurrent, timeout_s).run())
        try:
            yield working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            server.close()
            await asyncio.sleep(0.1)  # for the request that waits for a task


def played(producer: Producer, player: Player, count: int, **settings: Any) -> dict[str, dict[str, Any]]:
    """What was posted, by path, once there are `count`."""

    async def body() -> None:
        async with looping(producer, player, **settings) as working:
            while len(producer.posted) < count:
                assert not working.done()
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(body(), 20))
    return dict(producer.posted)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_loop, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(task_loop, "_PAUSE_S", 0.01)


def test_episodes_are_played_some_at_a_time_and_rewarded_by_the_names_that_are_asked_for():
    producer = Producer(task("a", 4), task("b", 4))
    player = Player(lambda episode: {"environment": float(episode[-1]), "style": math.nan, "other": 1.0})
    posted = played(producer, player, 8, max_concurrent=3)
    assert posted == {
        f"/{name}.{number}/reward": {"environment": float(number), "style": None}
        for name in "ab"
        for number in range(4)
    }
    assert player.most == 3
    assert producer.keys == {"bearer secret"}


def test_a_reward_that_the_environment_does_not_give_is_missing_and_said_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        posted = played(Producer(task("a", 2)), Player(lambda _: {"environment": 1, "tone": 2}), 2)
    assert posted["/a.1/reward"] == {"environment": 1.0, "style": None}
    assert [record.getMessage() for record in caplog.records] == [
        "reward style is missing: there are environment, tone"
    ]


@pytest.mark.long
def test_what_an_environment_raises_or_takes_too_long_for_fails_its_episode_alone():
    async def hang():
        await asyncio.sleep(60)

    def does(episode: str) -> Any:
        match episode[-1]:
            case "0":
                raise KeyError("number")
            case "1":
                return hang()
            case "2":
                raise TimeoutError("of its own")
        return {"environment": 1.0, "style": 0.0}

    posted = played(Producer(task("a", 4)), Player(does), 4, timeout_s=1.5)
    assert posted == {
        "/a.0/failure": {"reason": "KeyError: 'number'"},
        "/a.1/failure": {"reason": "it was not over within environment.episode_timeout_s=1.5 seconds"},
        "/a.2/failure": {"reason": "TimeoutError: of its own"},
        "/a.3/reward": {"environment": 1.0, "style": 0.0},
    }


def test_a_task_that_is_over_is_dropped_a_busy_producer_is_asked_again_and_a_refused_reward_fails():
    producer = Producer(task("over", 1), task("expired", 1, expires_in_s=-1.0), task("a", 2))
    gone = (404, {"error": {"type": "unknown_episode"}})
    producer.answers = {
        "/over.0/reward": [gone],
        "/a.0/reward": [(429, {}), (503, {})],
        "/a.1/reward": [(409, {"error": {"message": "nothing was sampled for this episode"}})],
    }
    player = Player(lambda _: {"environment": 1.0, "style": 0.0})
    posted = played(producer, player, 2)
    assert posted["/a.0/reward"] == {"environment": 1.0, "style": 0.0}
    assert "nothing was sampled" in posted["/a.1/failure"]["reason"]
    assert len(posted) == 2


def test_no_task_is_taken_while_nothing_could_be_played():
    producer, player = Producer(task("a", 1)), Player(lambda _: {"environment": 1.0, "style": 0.0})
    player.problems = ["the server is away"] * 3
    played(producer, player, 1)
    assert player.problems == []
