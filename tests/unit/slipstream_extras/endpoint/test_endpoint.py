"""The endpoint over real sockets with a stand-in for vLLM: what is refused, counted, cut off, and left undisturbed."""

import asyncio
import base64
import itertools
import json
import math
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from producer.engine_gate import EngineGate
from producer.rollouts.in_flight import BusyClock
from protocol.config.operation import ServeSection
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, EndpointInUseError
from protocol.runtime.http_server import ConnectionLimiter
from protocol.wire.messages import Sampling
from replay.lease_ids import Key, LeaseId
from slipstream_extras.endpoint.agents import Agents
from slipstream_extras.endpoint.generation import ServedEngine
from slipstream_extras.endpoint.http import check_access
from slipstream_extras.endpoint.openai import Answer, Call, RefusedError
from slipstream_extras.endpoint.serving import listening, read_keys
from tests.policies import Policies
from tests.scripted_trainer import lease
from tests.served import served
from tests.unit.producer.loop import asynchronous, until

KEY = b"k" * 32
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def posted(body: bytes, *headers: bytes) -> bytes:
    return HEAD + b"".join(line + b"\r\n" for line in headers) + b"content-length: %d\r\n\r\n" % len(body) + body


class Vllm:
    """Answers with one token, after `delay_s`."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.running = 0
        self.events = [f"data: {number}\n\n" for number in range(3)]

    async def answer(self, request, call: Call) -> Answer:
        if request.fields.get("user") == "refuse":
            raise RefusedError(400, "malformed", "vLLM refused: no")
        if request.fields.get("user") == "crash":
            raise RuntimeError("a defect")
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        sampled = call.of("r", 0, [1, 2])
        sampled.finish_reason = "stop"
        sampled.token_ids, sampled.logprobs, sampled.token_versions = [7], [-0.5], [call.adapter.version]
        return self._events() if request.fields.get("stream") else {"choices": [], "model": "?"}

    async def _events(self):
        for event in self.events:
            yield event
            await asyncio.sleep(self.delay_s)


class Endpoint:
    """A running one, and clients of it."""

    def __init__(self, port: int, vllm: Vllm, metrics: CollectorRegistry, registry: Policies) -> None:
        self.port = port
        self.vllm = vllm
        self.metrics = metrics
        self.registry = registry
        self.limiter: ConnectionLimiter
        self.clock: BusyClock
        self.gate: EngineGate

    def value(self, name: str, **labels: Any) -> float:
        return self.metrics.get_sample_value(f"rl_producer_serve_{name}", labels) or 0.0

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, data: bytes, timeout_s: float = 5.0) -> bytes:
        """Whatever comes back until the server hangs up."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(-1), timeout_s)
        writer.close()
        return answer

    async def post(
        self, body: Any, path: str = "/v1/chat/completions", method: str = "POST", **headers: Any
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {
            "host": "127.0.0.1",
            "content-type": "application/json",
            "content-length": str(len(data)),
            "connection": "close",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        answer = await self.send(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
        head, _, content = answer.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), content


@asynccontextmanager
async def endpoint(folder: Path, keys: tuple[bytes, ...] = (), agents: Agents | None = None, **settings: Any):
    config = RunConfig.model_validate(
        {
            "run_dir": str(folder),
            "model": {"path": "unused"},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"function": "unused:reward"}]},
            "serve": {"enabled": True} | settings,
        }
    )
    vllm, metrics, registry = Vllm(), CollectorRegistry(), Policies()
    registry.swap(12)
    clock = BusyClock()
    engine = ServedEngine(vllm, registry, 16, clock.running, gate := EngineGate())
    async with served(config, engine, metrics, keys, agents) as (listener, serving):
        it = Endpoint(listener.getsockname()[1], vllm, metrics, registry)
        it.clock, it.limiter, it.gate = clock, serving._server._limiter, gate
        yield it
    assert not list((folder / "serve").glob("*.json"))


@asynchronous
async def test_an_answer_names_its_version_and_where_it_listens_is_in_a_file(tmp_path):
    async with endpoint(tmp_path) as it:
        await until(lambda: list((tmp_path / "serve").glob("*.json")))
        (file,) = (tmp_path / "serve").glob("rl-producer-test.json")
        assert json.loads(file.read_text())[0]["targets"] == [f"127.0.0.1:{it.port}"]
        status, headers, content = await it.post(CHAT)
        assert (status, headers["x-policy-version"]) == (200, "12")
        assert json.loads(content)["model"] == "policy@v12"
        assert it.clock.busy_s() == it.clock.busy_s() > 0, "while it was in the engine, and no longer"
        status, headers, content = await it.post(CHAT | {"stream": True})
        assert (status, headers["x-policy-version"]) == (200, "12")
        assert headers["content-type"] == "text/event-stream"
        assert [line for line in content.split(b"\r\n") if b"data" in line] == [b"data: %d\n\n" % n for n in range(3)]
        assert b"policy@v12" in await it.send(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        assert (await it.post(CHAT | {"n": 5}))[0] == 400, "clients have a quarter of the engine's 16 places"
        assert it.value("requests_total", outcome="completed") == 3
        assert it.value("tokens_total", kind="completion") == 2
        assert it.value("tokens_total", kind="prompt") == 4


@asynchronous
async def test_what_is_wrong_is_refused_and_counted_by_its_reason(tmp_path):
    async with endpoint(tmp_path, max_request_bytes=2048, max_requests=2, max_waiting=0) as it:
        too_large = CHAT | {"user": "u" * 3000}
        expected = [
            (await it.post(too_large), 413, "too_large"),
            (await it.post(too_large, content_length="junk"), 400, None),  # h11 hangs up itself
            (await it.post(b"{"), 400, "malformed"),
            (await it.post(CHAT | {"n": 3}), 400, "malformed"),
            (await it.post(CHAT | {"user": "refuse"}), 400, "malformed"),
            (await it.post(CHAT, content_type="text/plain"), 415, "malformed"),
            (await it.post(CHAT | {"model": "policy@v3"}), 404, "unknown_model"),
            (await it.post(CHAT, host="evil.example"), 403, "wrong_host"),
            (await it.post(CHAT | {"user": "crash"}), 500, "failed"),
            (await it.post(CHAT, path="/v1/load_lora_adapter"), 404, None),
        ]  # fmt: skip
        for (status, _, content), wanted, reason in expected:
            assert status == wanted, content
            if reason:
                assert json.loads(content)["error"]["type"] == reason
        it.vllm.delay_s = 0.5
        answers = await asyncio.gather(*(it.post(CHAT) for _ in range(3)))
        assert sorted(status for status, _, _ in answers) == [200, 200, 429]
        refused = {reason: it.value("refused_total", reason=reason) for reason in ("too_large", "malformed", "busy")}
        assert refused == {"too_large": 1, "malformed": 5, "busy": 1}
        assert it.value("refused_total", reason="wrong_host") == it.value("refused_total", reason="unknown_model") == 1
        assert it.value("requests_total", outcome="failed") == 1
        assert it.value("completions", state="generating") == 0


@pytest.mark.long
@asynchronous
async def test_clients_wait_in_the_trainers_turn_and_those_that_cannot_are_told_to_come_again(tmp_path):
    async with endpoint(tmp_path, request_timeout_s=1.5) as it:
        it.vllm.delay_s = 30.0
        inside = asyncio.create_task(it.post(CHAT))
        await until(lambda: it.vllm.running == 1)
        await it.gate.close(0.05)
        status, headers, content = await inside
        assert (status, headers["retry-after"]) == (429, "1")
        assert b"it is the trainer's turn on the GPU" in content
        assert it.vllm.running == 0
        it.vllm.delay_s = 0.0
        waiting = asyncio.create_task(it.post(CHAT))
        await until(lambda: it.value("completions", state="generating") == 1)
        assert it.vllm.running == 0
        it.gate.open()
        assert (await waiting)[0] == 200
        await it.gate.close(0.0)
        assert (await it.post(CHAT))[0] == 429, "its time is over before the turn is"
        assert it.value("refused_total", reason="busy") == 2
        assert it.value("requests_total", outcome="timed_out") == 0


def basic(password: bytes) -> str:
    """As the password of a URL is sent, which is all that environments of Atropos can do."""
    return f"Basic {base64.b64encode(b'atropos:' + password).decode()}"


@pytest.mark.parametrize("sent", [f"Bearer {KEY.decode()}", basic(KEY), "Bearer other-key-of-some-length"])
def test_who_sends_a_key_may_ask_under_any_name_of_the_host(sent):
    fields = {"host": "serve.example", "authorization": sent, "content-type": "application/json; charset=utf-8"}
    check_access(scope_of(fields), (b"other-key-of-some-length", KEY), "127.0.0.1")


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "Bearer ",
        f"Bearer {'k' * 31}",
        "Basic x",
        "Basic ?",
        "Basic ",
        f"Basic {KEY.decode()}",
        basic(KEY[1:]),
        "Basic \u00e9",
    ],
)
def test_who_sends_no_key_may_not(sent):
    with pytest.raises(RefusedError) as refused:
        check_access(scope_of({"host": "localhost", "authorization": sent}), (KEY,), "127.0.0.1")
    assert (refused.value.status, refused.value.reason) == (401, "wrong_key")


@pytest.mark.parametrize(
    ("host", "may"), [("[::1]:8100", True), ("10.0.0.7", True), ("evil.example:8100", False), ("", False)]
)
def test_without_keys_only_the_endpoints_own_names_are_served(host, may):
    scope = scope_of({"host": host, "content-type": "application/json"})
    with nullcontext() if may else pytest.raises(RefusedError, match="under its own address alone"):
        check_access(scope, (), "10.0.0.7")


def scope_of(fields: dict[str, str]) -> dict[str, Any]:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
    return {"type": "http", "method": "POST", "headers": headers}


def test_a_key_shows_nowhere(tmp_path, caplog):
    async def body():
        async with endpoint(tmp_path, keys=(KEY,)) as it:
            assert (await it.post(CHAT, authorization="Bearer no"))[0] == 401
            assert (await it.post(CHAT, authorization=f"Bearer {KEY.decode()}"))[0] == 200
            assert it.value("refused_total", reason="wrong_key") == 1

    caplog.set_level("DEBUG")
    asyncio.run(body())
    assert KEY.decode() not in caplog.text


@asynchronous
async def test_connections_and_their_bodies_are_bounded_and_counted(tmp_path):
    async with endpoint(tmp_path, receive_timeout_s=0.5, max_connections=4) as it:
        slow = [await it.connect() for _ in range(6)]
        for _, writer in slow:
            writer.write(HEAD + b"content-length: 900\r\n\r\n{")
        await asyncio.gather(*(reader.read(-1) for reader, _ in slow), return_exceptions=True)
        assert it.value("refused_total", reason="too_many_connections") >= 2
        assert sum(it.value("refused_total", reason=reason) for reason in ("too_many_connections", "too_slow")) == 6
        assert (await it.post(CHAT))[0] == 200
        for _, writer in slow:
            writer.close()


@asynchronous
async def test_an_answer_that_takes_too_long_is_given_up(tmp_path):
    async with endpoint(tmp_path, request_timeout_s=0.1) as it:
        it.vllm.delay_s = 30.0
        status, _, content = await it.post(CHAT)
        assert (status, json.loads(content)["error"]["type"]) == (504, "timed_out")
        assert (it.value("requests_total", outcome="timed_out"), it.vllm.running) == (1, 0)
        assert it.registry.pinned() == {12}


@asynchronous
async def test_an_agent_takes_a_task_generates_for_its_episodes_and_rewards_them(tmp_path):
    agents = Agents(("solved",))
    async with endpoint(tmp_path, agents=agents) as it:
        assert (await it.post({}, "/v1/rollouts"))[0] == 204
        for wrong in ({"wait_s": -1}, {"wait_s": "1"}, {"wait_s": 61}, {"n": 1}):
            assert (await it.post(wrong, "/v1/rollouts"))[0] == 400
        taking = asyncio.create_task(it.post({"wait_s": 5}, "/v1/rollouts"))
        await asyncio.sleep(0.05)
        fulfilling = asyncio.create_task(agents.fulfil(lease(7, sampling=Sampling(2, 8, 1.0))))
        task = json.loads((await taking)[2])
        assert task["episodes"] == ["lease-7.0", "lease-7.1"]
        assert (await it.post(CHAT, x_episode="lease-7.0"))[0] == 200
        assert (await it.post(CHAT | {"stream": True, "metadata": {"episode": "lease-7.1"}}))[0] == 200
        assert (await it.post(CHAT | {"temperature": 0.5}, x_episode="lease-7.1"))[0] == 400
        status, _, content = await it.post(CHAT, x_episode="lease-8.0")
        assert (status, json.loads(content)["error"]["type"]) == (404, "unknown_episode")
        for wrong in (b'{"solved": {"turns": [NaN]}}', {"solved": {"turns": [1, 1]}}, {"solved": [1]}):
            assert (await it.post(wrong, "/v1/rollouts/lease-7.0/reward"))[0] == 400
        status, _, content = await it.post({"solved": {"turns": [1]}}, "/v1/rollouts/lease-7.0/reward")
        assert (status, json.loads(content)["episodes_left"]) == (200, 1)
        for wrong in ({}, {"reason": ""}, {"reason": 1}, {"reason": "a", "more": 1}):
            assert (await it.post(wrong, "/v1/rollouts/lease-7.1/failure"))[0] == 400
        assert (await it.post({"reason": "x" * 3000}, "/v1/rollouts/lease-7.1/failure"))[0] == 200
        episodes, rewards, _ = await fulfilling
        assert rewards[0].tolist() == [1.0]
        assert episodes[0].records[0].credit[-1] == 1.0
        assert math.isnan(rewards[1, 0])
        assert [len(episode.failure) for episode in episodes] == [0, 2000]
        assert [episode.records[0].token_ids for episode in episodes] == [[1, 2, 7], [1, 2, 7]]
        assert it.value("episodes_total", outcome="rewarded") == 1
        assert it.value("episodes_total", outcome="failed") == 1


TEXT = {"model": "policy", "prompt": "hi"}
OVER = f"{LeaseId(Key(0, 3), 1, 'a0b1c2d3')}.1"  # an episode of another task

EPISODES = {"lease-7.0", "lease-7.1"}


def ways(episode: str) -> list[dict[str, Any]]:
    """Return every way to name an episode, as arguments of `Endpoint.post`."""
    return [
        {"body": CHAT, "path": f"/episodes/{episode}/v1/chat/completions"},
        {"body": CHAT, "x_episode": episode},
        {"body": CHAT | {"metadata": {"episode": episode}}},
        {"body": CHAT | {"session_id": episode}},
        {"body": CHAT, "X_Session_ID": episode},
    ]


@asynccontextmanager
async def taken(folder: Path, **how: Any):
    """An endpoint and the two episodes of a task that an agent took."""
    agents = Agents(("solved",))
    async with endpoint(folder, agents=agents, **how) as it:
        fulfilling = asyncio.create_task(agents.fulfil(lease(7, sampling=Sampling(2, 8, 0.7))))
        assert await agents.take(5.0)
        try:
            yield it, agents, [agents.find(name)[1] for name in sorted(EPISODES)]
        finally:
            fulfilling.cancel()


@asynchronous
async def test_every_way_to_name_an_episode_records_its_call_there(tmp_path):
    async with taken(tmp_path) as (it, _, (first, second)):
        for count, way in enumerate(ways("lease-7.0"), start=1):
            assert (await it.post(**way))[0] == 200
            assert (len(first.turns), len(second.turns)) == (count, 0)
        assert (
            await it.post(
                TEXT | {"session_id": "lease-7.1"}, "/episodes/lease-7.1/v1/completions", X_Session_ID="lease-7.1"
            )
        )[0] == 200
        assert len(second.turns) == 1
        answers = [await it.post(b"", f"{prefix}/v1/models", "GET") for prefix in ("", "/episodes/lease-7.0")]
        assert answers[0] == answers[1]
        assert answers[0][0] == 200
        assert len(first.turns) == 5


@asynchronous
async def test_names_that_disagree_are_refused_and_both_places_are_named(tmp_path):
    places = ("the URL", "x-episode", "metadata.episode", "session_id", "x-session-id")
    async with taken(tmp_path) as (it, _, episodes):
        for one, other in itertools.combinations(range(5), 2):
            for names in (("lease-7.0", "lease-7.1"), ("lease-7.0", OVER), (OVER, "lease-7.1")):
                a, b = ways(names[0])[one], ways(names[1])[other]
                status, _, content = await it.post(**(b | a | {"body": a["body"] | b["body"]}))
                error = json.loads(content)["error"]
                assert (status, error["type"], error["param"]) == (400, "malformed", "episode")
                for place, name in zip((places[one], places[other]), names, strict=True):
                    assert place in error["message"]
                    assert name in error["message"]
        assert [episode.num_calls for episode in episodes] == [0, 0]


@asynchronous
async def test_an_episode_that_is_over_or_unknown_is_refused_in_every_way(tmp_path):
    async with taken(tmp_path) as (it, agents, (first, _)):
        assert (await it.post(**ways("lease-7.0")[0]))[0] == 200
        agents.reward("lease-7.0", {"solved": 1.0})
        for way in ways("lease-7.0"):
            assert (await it.post(**way))[0] == 409
        named = (*ways("lease-7.2")[:3], *ways("lease-7.00")[:3], *ways(OVER))
        for way in named:
            status, _, content = await it.post(**way)
            assert (status, json.loads(content)["error"]["type"]) == (404, "unknown_episode")
        for odd in ("", "..", "%00", "%2e%2e", "a%2Fb", "lease-7.0%20", "%F0%9F%90%8C", "lease-7.0%0d%0a", "x" * 9000):
            for body, method, what in (
                (CHAT, "POST", "chat/completions"),
                (TEXT, "POST", "completions"),
                (b"", "GET", "models"),
            ):
                assert (await it.post(body, f"/episodes/{odd}/v1/{what}", method))[0] == 404
        assert len(first.turns) == 1
        assert agents._episodes.keys() == EPISODES


@asynchronous
async def test_a_session_that_is_no_episodes_is_a_label_of_the_client(tmp_path):
    labels = [
        "s",
        "ses_0a1b2c",
        "550e8400-e29b-41d4-a716-446655440000",
        "1732628238.12",
        "lease-7.x",
        "user-42.1",
        "claude-3.5",
        "2026-11-28T18:35:13.250",
        "2026-11-28-18-35.213",
        "10-0.7",
        "0-3-0-1-a0b1c2d3",
        OVER.replace("3", "\u0663"),
        "",
        "\u00e9 \n",
        "-" * 900_000,
    ]
    async with taken(tmp_path) as (it, agents, (first, second)):
        for label in labels:
            assert (await it.post(CHAT | {"session_id": label}))[0] == 200
            assert (await it.post(CHAT | {"session_id": label}, "/episodes/lease-7.0/v1/chat/completions"))[0] == 200
        for label in filter(str.isascii, labels[:-2]):
            assert (await it.post(CHAT, X_Session_ID=label))[0] == 200
            assert (await it.post(CHAT, X_Session_ID=label, x_episode="lease-7.0"))[0] == 200
        assert (len(first.turns), len(second.turns)) == (27, 0)
        for wrong in (3, ["lease-7.0"], {"id": "lease-7.0"}, True):
            status, _, content = await it.post(CHAT | {"session_id": wrong})
            assert (status, json.loads(content)["error"]["param"]) == (400, "session_id")
        assert agents._episodes.keys() == EPISODES


@asynchronous
async def test_the_url_of_an_episode_needs_the_key(tmp_path):
    async with taken(tmp_path, keys=(KEY,)) as (it, _, (first, _)):
        for episode in ("lease-7.0", "lease-9.0"):
            assert (await it.post(**ways(episode)[0]))[0] == 401
            assert (await it.post(b"", f"/episodes/{episode}/v1/models", "GET"))[0] == 401
        assert (await it.post(**ways("lease-7.0")[0], authorization=f"Bearer {KEY.decode()}"))[0] == 200
        assert first.num_calls == 1


@asynchronous
async def test_a_run_without_posted_rewards_has_no_episodes(tmp_path):
    async with endpoint(tmp_path) as it:
        for way in ways("lease-7.0")[:3]:
            status, _, content = await it.post(**way)
            assert (status, json.loads(content)["error"]["param"]) == (400, "episode")
        for way in ways("lease-7.0")[3:]:  # labels, because no client can have an episode
            assert (await it.post(**way))[0] == 200
        assert (await it.post({}, "/v1/rollouts"))[0] == 404


def test_ports_and_key_files_are_checked_before_the_engine_is_loaded(tmp_path):
    file = tmp_path / "keys"
    file.write_text("0123456789abcdef\n\nfedcba9876543210\n")
    file.chmod(0o600)
    assert read_keys(str(file)) == (b"0123456789abcdef", b"fedcba9876543210")
    assert read_keys(None) == ()
    for content in ("short\n", ""):
        file.write_text(content)
        with pytest.raises(ConfigError, match="at least 16 characters per line"):
            read_keys(str(file))
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"serve.api_key_file: .*others can read this secret"):
        read_keys(str(file))
    with listening(ServeSection(enabled=True), []) as first:
        port = first.getsockname()[1]
        with (
            pytest.raises(EndpointInUseError, match=f"serve.port: 127.0.0.1:{port} is in use"),
            listening(ServeSection(enabled=True, port=port), []),
        ):
            pass
