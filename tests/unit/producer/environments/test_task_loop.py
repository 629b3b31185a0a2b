"""What an agent program makes of tasks, whatever its environment and its producer do."""

import asyncio
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from producer.environments import task_loop
from producer.environments.task_loop import HttpClient, PolicyEndpoint, TaskLoop
from tests.unit.producer.loop import asynchronous, until


class Producer:
    """Takes the place of the HTTP client: hands out tasks, and keeps what is posted; `answers` are given first, by path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *tasks: dict[str, Any]) -> None:
        self.tasks = list(tasks)
        self.posted: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.headers: dict[str, str] = {}
        monkeypatch.setattr(task_loop, "HttpClient", self._client)
        monkeypatch.setattr(task_loop, "_FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(task_loop, "_PAUSE_S", 0.01)

    def _client(self, _num_threads: int, headers: dict[str, str]) -> "Producer":
        self.headers = headers
        return self

    async def ask(self, url: str, body: bytes, _timeout_s: float) -> tuple[int, bytes]:
        path = url.removeprefix("http://policy/v1/rollouts")
        await asyncio.sleep(0 if path or self.tasks else 0.01)
        if not path:
            return (200, json.dumps(self.tasks.pop(0)).encode()) if self.tasks else (204, b"")
        if self.answers.get(path):
            status, said = self.answers[path].pop(0)
            return status, json.dumps(said).encode()
        self.posted[path] = json.loads(body)
        return 200, b"{}"

    async def played(
        self, player: "Player", count: int, max_concurrent: int = 4, timeout_s: float = 30.0
    ) -> dict[str, dict[str, Any]]:
        """What was posted, by path, once there are `count`."""
        endpoint = PolicyEndpoint("http://policy/v1", "secret", max_concurrent + 1)
        working = asyncio.create_task(TaskLoop(endpoint, player, asyncio.Semaphore(max_concurrent), timeout_s).run())
        await until(lambda: working.done() or len(self.posted) >= count)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        return self.posted


class Player:
    """Plays as `does` says."""

    def __init__(self, does: Callable[[str], Any]) -> None:
        self.does = does
        self.num_playing = self.most = 0
        self.problems: list[str] = []

    async def problem(self) -> str:
        return self.problems.pop(0) if self.problems else ""

    async def play(self, _task: dict[str, Any], episode: str) -> Any:
        self.num_playing += 1
        self.most = max(self.most, self.num_playing)
        try:
            await asyncio.sleep(0.01)
            found = self.does(episode)
            return await found if asyncio.iscoroutine(found) else found
        finally:
            self.num_playing -= 1


def task(name: str, count: int, expires_in_s: float = 60.0) -> dict[str, Any]:
    episodes = [f"{name}.{number}" for number in range(count)]
    return {"id": name, "episodes": episodes, "rewards": ["environment", "style"], "expires_in_s": expires_in_s}


@asynchronous
async def test_episodes_are_played_some_at_a_time_and_rewarded_by_the_names_that_are_asked_for(monkeypatch):
    producer = Producer(monkeypatch, task("a", 4), task("b", 4))
    player = Player(lambda episode: {"environment": float(episode[-1]), "style": math.nan, "other": 1.0})
    assert await producer.played(player, 8, max_concurrent=3) == {
        f"/{name}.{number}/reward": {"environment": float(number), "style": None}
        for name in "ab"
        for number in range(4)
    }
    assert player.most == 3
    assert producer.headers == {"authorization": "Bearer secret"}


@asynchronous
async def test_a_reward_that_the_environment_does_not_give_is_missing_and_said_once(monkeypatch, caplog):
    producer = Producer(monkeypatch, task("a", 2))
    posted = await producer.played(Player(lambda _: {"environment": {"turns": [1]}, "tone": 2}), 2)
    assert posted["/a.1/reward"] == {"environment": {"turns": [1]}, "style": None}
    assert caplog.messages == ["reward style is missing: there are environment, tone"]


@asynchronous
async def test_what_an_environment_raises_or_takes_too_long_for_fails_its_episode_alone(monkeypatch):
    def does(episode: str) -> Any:
        match episode[-1]:
            case "0":
                raise KeyError("number")
            case "1":
                return asyncio.sleep(60)
            case "2":
                raise TimeoutError("of its own")
            case "4":
                sys.exit("bad arguments")
        return {"environment": 1.0, "style": 0.0}

    assert await Producer(monkeypatch, task("a", 5)).played(Player(does), 5, timeout_s=0.5) == {
        "/a.0/failure": {"reason": "KeyError: 'number'"},
        "/a.1/failure": {"reason": "it was not over within environment.episode_timeout_s=0.5 seconds"},
        "/a.2/failure": {"reason": "TimeoutError: of its own"},
        "/a.3/reward": {"environment": 1.0, "style": 0.0},
        "/a.4/failure": {"reason": "SystemExit: bad arguments"},
    }


class Several:
    def __float__(self) -> float:
        raise RuntimeError("a tensor with 2 elements cannot be converted to a scalar")


@asynchronous
async def test_a_reward_of_any_kind_costs_its_episode_alone(monkeypatch):
    def does(episode: str) -> Any:
        match episode[-1]:
            case "0":
                return {"environment": {"turns": [object()]}}
            case "1":
                return None
            case "2":
                raise ValueError("half a character: \ud800")
        return {"environment": Several(), "style": 0.5}

    posted = await Producer(monkeypatch, task("a", 4)).played(Player(does), 4)
    assert posted.keys() == {"/a.0/failure", "/a.1/failure", "/a.2/failure", "/a.3/reward"}
    assert "not JSON serializable" in posted["/a.0/failure"]["reason"]
    assert posted["/a.2/failure"]["reason"] == "ValueError: half a character: ?", "the endpoint takes no others"
    assert posted["/a.3/reward"] == {"environment": None, "style": 0.5}


@pytest.mark.parametrize("status", [200, 500])
@asynchronous
async def test_an_answer_that_ends_early_is_none(status):
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 %d OK\r\nContent-Length: 9\r\n\r\n{" % status)
        writer.close()

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(OSError, match="8 bytes"):
            await HttpClient(1).ask(url, b"{}", 10.0)


@pytest.mark.long
@pytest.mark.parametrize(
    "begin", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
)
@pytest.mark.parametrize("limit_s", [0.1, 60.0])
@asynchronous
async def test_a_trickled_answer_holds_a_thread_no_longer_than_the_limit_or_a_cancellation(begin, limit_s):
    asked, ended = asyncio.Event(), asyncio.Event()

    async def trickles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/whole" in await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        else:
            asked.set()
            writer.write(begin)
            while not writer.is_closing():
                writer.write(b"1")
                await asyncio.sleep(0.01)
            ended.set()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(trickles, "127.0.0.1", 0) as server:
        url, client = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", HttpClient(1)
        asking = asyncio.create_task(client.ask(f"{url}/trickled", None, limit_s))
        await asked.wait()
        if limit_s > 1.0:
            asking.cancel()
        with pytest.raises(TimeoutError if limit_s < 1.0 else asyncio.CancelledError):
            await asyncio.wait_for(asking, 20.0)
        await ended.wait()
        assert await asyncio.wait_for(client.ask(f"{url}/whole?a=b", None, 20.0), 20.0) == (200, b"ok")


@asynchronous
async def test_a_task_that_is_over_is_dropped_a_busy_producer_is_asked_again_and_a_refused_reward_fails(monkeypatch):
    producer = Producer(monkeypatch, task("over", 1), task("expired", 1, expires_in_s=-1.0), task("a", 2))
    producer.answers = {
        "/over.0/reward": [(404, {"error": {"type": "unknown_episode"}})],
        "/a.0/reward": [(429, {}), (503, {})],
        "/a.1/reward": [(409, {"error": {"message": "nothing was sampled for this episode"}})],
    }
    posted = await producer.played(Player(lambda _: {"environment": 1.0, "style": 0.0}), 2)
    assert posted["/a.0/reward"] == {"environment": 1.0, "style": 0.0}
    assert "nothing was sampled" in posted["/a.1/failure"]["reason"]
    assert len(posted) == 2


@asynchronous
async def test_no_task_is_taken_while_nothing_could_be_played(monkeypatch):
    producer, player = Producer(monkeypatch, task("a", 1)), Player(lambda _: {"environment": 1.0, "style": 0.0})
    player.problems = ["the server is away"] * 3
    await producer.played(player, 1)
    assert player.problems == []
