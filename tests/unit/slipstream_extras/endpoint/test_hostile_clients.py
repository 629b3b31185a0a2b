"""Clients that keep no rules end nothing, grow nothing and stop nobody: whatever they send, and whenever they leave."""

import asyncio
import json

import pytest

from tests.unit.producer.loop import asynchronous, settle, until
from tests.unit.slipstream_extras.endpoint.test_endpoint import CHAT, HEAD, Endpoint, endpoint, posted

NO_REQUESTS = {
    "zeros": bytes(100) + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
    "two hosts": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
    "a path of 20 kB": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    "4000 headers": HEAD + b"connection: close\r\n" + b"x: a\r\n" * 4000 + b"\r\n",
    "too many digits": HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
    "an endless chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n" + b"a" * 10_000,
    "less than announced": HEAD + b"content-length: 100\r\n\r\n{",
    "a WebSocket": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n",
    "a body for GET": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 9\r\n\r\n123456789",
    "another path": b"GET /../../etc/passwd%00 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
}
NO_BODIES = {
    "deep": b"[" * 500_000,
    "deep in a field": b'{"model": "policy", "messages": ' + b'[{"a":' * 100_000,
    "half a character": b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "many": b'{"model": "policy", "messages": [{"role": "user", "content": ""}], "n": %d}' % 10**400,
    "one of many names": json.dumps({f"field {number}": 1 for number in range(20_000)}).encode(),
    "the name of a model of 900 kB": b'{"model": "'
    + b"p" * 900_000
    + b'", "messages": [{"role": "user", "content": ""}]}',
}


async def num_tasks(it: Endpoint) -> int:
    """Of a producer that has answered a request and has none."""
    assert (await it.post(CHAT))[0] == 200
    await until(lambda: not it.limiter._open)
    await settle()
    return len(asyncio.all_tasks())


async def check_untouched(it: Endpoint, tasks_before: int) -> None:
    """Everything is free, and an honest request is answered."""
    await until(lambda: it.vllm.running == it.value("completions", state="generating") == 0)
    await until(lambda: not it.limiter._open)
    assert it.value("completions", state="waiting") == it.value("requests_total", outcome="failed") == 0
    assert await num_tasks(it) == tasks_before
    assert it.registry.pins == {12: 1}, "the current version, kept once"
    assert not it.limiter._timers


@pytest.mark.long
@asynchronous
async def test_whatever_bytes_come_are_refused_and_counted(tmp_path):
    async with endpoint(tmp_path, receive_timeout_s=0.3) as it:
        before = await num_tasks(it)
        for name, data in NO_REQUESTS.items():
            answer = await it.send(data, 30.0)
            assert not answer.startswith(b"HTTP/1.1 5"), name
        for name, data in NO_BODIES.items():
            answer = await it.send(posted(data, b"connection: close"), 30.0)
            assert answer.startswith(b"HTTP/1.1 4"), name
        await check_untouched(it, before)
        assert it.value("refused_total", reason="malformed") >= len(NO_BODIES)


@pytest.mark.long
@asynchronous
async def test_clients_that_do_not_read_are_cut_off_and_hold_nothing(tmp_path):
    async with endpoint(tmp_path, request_timeout_s=1.0, receive_timeout_s=0.5) as it:
        before = await num_tasks(it)
        it.vllm.events = [f"data: {'x' * 100_000}\n\n"] * 10_000
        stream = posted(json.dumps(CHAT | {"stream": True}).encode())
        clients = [await it.connect() for _ in range(4)]
        for number, (reader, writer) in enumerate(clients):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(stream * (1 + 100 * number))  # one request behind the other
        await until(lambda: it.value("completions", state="generating") == 4)
        assert (await it.post(CHAT | {"n": 0}))[0] == 400, "beside them"
        await check_untouched(it, before)
        assert it.value("requests_total", outcome="timed_out") == 4
        assert it.value("refused_total", reason="too_slow") == 4
        for _, writer in clients:
            writer.transport.abort()
