"""A request of a client that is cancelled at any of its waits, as a daemon that stops does it, gives everything back; so does
one whose client hangs up at any of them."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from producer.rollouts.in_flight import BusyClock
from protocol.config.operation import ServeSection
from slipstream_extras.endpoint.generation import ClientGeneration, ServedEngine
from slipstream_extras.endpoint.http import Endpoint
from slipstream_extras.endpoint.metrics import ServeMetrics
from slipstream_extras.endpoint.openai import Answer, Call
from slipstream_extras.endpoint.versions import ClientLimiter, ServedVersions
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import settle
from tests.unit.producer.policies.test_registry import Setup, blob

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


class Vllm:
    """Samples three tokens, each read by the caller. Meanwhile their version is superseded."""

    def __init__(self, supersede: Callable[[], None]) -> None:
        self.running = 0
        self.supersede = supersede
        self.wait: Callable[[], Awaitable[None]] = settle

    async def answer(self, request, call: Call) -> Answer:
        tokens = call.add("r", self._tokens(call))
        if request.fields.get("stream"):
            return (f"data: {token}\n\n" async for token in tokens)
        return {"choices": [token async for token in tokens]}

    async def _tokens(self, call: Call):
        call.note_reader("r")
        self.running += 1
        try:
            sampled = call.of("r", 0, [1])
            for token in range(3):
                await self.wait()
                self.supersede()
                sampled.token_ids.append(token)
                sampled.token_versions.append(call.adapter.version)
                yield token
                call.note_reader("r")
        finally:
            self.running -= 1
            await asyncio.sleep(0)


class Scene:
    """An endpoint with one place, where two requests begin: the second waits for the place of the first."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.vllm = Vllm(lambda: setup.registry.start_session(blob(0)[0]))
        self.clock = BusyClock()
        self.limiter = ClientLimiter(1, 8)
        self.versions = ServedVersions(setup.registry, 0, 60.0, is_merged=False)
        self.metrics = ServeMetrics(CollectorRegistry(), self.limiter)
        engine = ServedEngine(self.vllm, setup.registry, 1, self.clock.running)
        generation = ClientGeneration(engine, self.versions, self.limiter, self.metrics)
        self.endpoint = Endpoint(ServeSection(enabled=True), (), generation)
        self.numbers = itertools.count(1)

    async def prepare(self) -> None:
        await self.setup.publish(next(self.numbers))

    async def request(self, body: dict[str, object], hangs_up_after: int = -1) -> int:
        """Of a client that is gone once the server has waited so many times, for it or for the engine. Returns the number of
        these waits."""
        data, gone, num_waits = json.dumps(body).encode(), asyncio.Event(), 0

        async def waited() -> None:
            nonlocal num_waits
            if num_waits == hangs_up_after:
                gone.set()
            num_waits += 1
            await asyncio.sleep(0)

        self.vllm.wait = waited

        async def receive():
            nonlocal data
            if data:
                part, data = data[:40], data[40:]
                await waited()
                return {"type": "http.request", "body": part, "more_body": bool(data)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message) -> None:
            await waited()
            if message["type"] == "http.response.body" and not message.get("more_body"):
                gone.set()  # as uvicorn has it
                await asyncio.sleep(0)

        headers = {b"host": b"localhost", b"content-type": b"application/json"}
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": list(headers.items()),
            "root_path": "", "query_string": b"",
        }  # fmt: skip
        await self.endpoint(scope, receive, send)
        return num_waits

    async def two(self, body: dict[str, object]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(self.request(body))

    def check(self) -> None:
        assert (self.vllm.running, self.limiter.taken, self.limiter.num_waiting, self.clock._active) == (0, 0, 0, 0)
        assert sum(version.pins for version in self.setup.registry._versions.values()) == len(self.versions._uses) <= 1
        assert self.setup.folders() == len(self.setup.engine.versions) <= 1, "that which a request began on, or none"
        assert len(asyncio.all_tasks()) == 2, "this one, and the one that unloads"


@pytest.fixture
def run(tmp_path):
    async def main(body) -> None:
        setup = Setup(tmp_path)
        setup.engine.unload_waits = 10
        unloading = asyncio.create_task(setup.registry.unload_released())
        scene = Scene(setup)
        await body(scene)
        scene.versions.close()
        await settle()
        assert {version.pins for version in setup.registry._versions.values()} <= {0}
        unloading.cancel()

    return lambda body: asyncio.run(main(body))


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_is_cancelled_anywhere_gives_everything_back(run, streams):
    async def body(scene: Scene) -> None:
        body = CHAT | {"stream": streams}
        assert await cancel_at_each_wait(lambda: scene.request(body), scene.check, scene.prepare) >= 5
        scene.vllm.supersede = lambda: None  # the second could not begin
        await cancel_at_each_wait(lambda: scene.two(body), scene.check, scene.prepare)
        assert scene.metrics.outcomes["failed"] == 0

    run(body)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_hangs_up_anywhere_leaves_nothing_and_is_counted(run, streams):
    async def body(scene: Scene) -> None:
        body = CHAT | {"stream": streams}
        await scene.prepare()
        num_waits = await scene.request(body)
        assert scene.metrics.outcomes == {"completed": 1}
        for number in range(num_waits):
            await scene.prepare()
            await scene.request(body, hangs_up_after=number)
            await settle()
            scene.check()
        assert scene.metrics.outcomes["failed"] == 0
        assert scene.metrics.outcomes.total() == num_waits + 1
        assert scene.metrics.outcomes["client_gone"] > 0

    run(body)
