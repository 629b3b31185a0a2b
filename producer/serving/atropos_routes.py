"""The API of Atropos' rollout server below `/atropos`, as far as environments use it (docs/environments.md).

Guarantee: as `producer.environments.atropos`, over HTTP; a body is bounded before and after it is unpacked.
"""

import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from producer.calls.calls import Call
from producer.calls.refusals import RefusedError
from producer.calls.requests import ServedRequest, check_request, parse_object
from producer.environments.atropos import Atropos
from producer.environments.registrations import parse_registration
from producer.environments.scored_data import parse_scored_data
from producer.serving.http_parts import App

PREFIX = "/atropos"

ReadBody = Callable[[Scope, Receive, int], Awaitable[bytes]]


def atropos_routes(atropos: Atropos, read_body: ReadBody) -> list[Route]:
    """
    Args:
        read_body: of a request, at most so many bytes.
    """
    limit = atropos.max_body_bytes

    async def read(scope: Scope, receive: Receive) -> bytes:
        body = await read_body(scope, receive, limit)
        return unzip(body, limit) if "gzip" in Headers(scope=scope).get("content-encoding", "").lower() else body

    def says(answer: Callable[[bytes], dict[str, Any]]) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await JSONResponse(answer(await read(scope, receive)))(scope, receive, send)

        return App(app)

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        status = 200 if atropos.is_ready else 503
        await JSONResponse({}, status)(scope, receive, send)

    posts: dict[str, Callable[[bytes], dict[str, Any]]] = {
        "register-env": lambda body: atropos.register(parse_registration(body)),
        "disconnect-env": lambda body: atropos.disconnect(parse_object(body).get("env_id")),
        "scored_data": lambda body: atropos.post(parse_scored_data(body, is_list=False)),
        "scored_data_list": lambda body: atropos.post(parse_scored_data(body, is_list=True)),
    }
    gets: dict[str, Callable[[bytes], dict[str, Any]]] = {
        "wandb_info": lambda _: atropos.names(),
        "info": lambda _: atropos.info(),
        "status": lambda _: atropos.status(),
        "status-env": lambda body: atropos.status(parse_object(body).get("env_id")),
    }
    return [
        *(Route(f"{PREFIX}/{name}", says(answer), methods=["POST"]) for name, answer in posts.items()),
        *(Route(f"{PREFIX}/{name}", says(answer), methods=["GET"]) for name, answer in gets.items()),
        Route(f"{PREFIX}/health", App(health), methods=["GET"]),
    ]


def unzip(body: bytes, limit: int) -> bytes:
    """
    Raises:
        RefusedError: it is no gzip, or more than `limit` bytes of text.
    """
    unpacking = zlib.decompressobj(wbits=31)
    try:
        text = unpacking.decompress(body, limit)
    except zlib.error as error:
        raise RefusedError(400, "malformed", f"the body is not gzip: {error}") from None
    if unpacking.unconsumed_tail:
        raise RefusedError(413, "too_large", f"the body has more than {limit} bytes; raise serve.max_request_bytes")
    if not unpacking.eof:
        raise RefusedError(400, "malformed", "the body is not gzip: it ends too early")
    return text


def parse_generate(body: bytes) -> ServedRequest:
    """A request to `/generate` of vLLM's own server: token ids, and the fields of its SamplingParams.

    Raises:
        RefusedError: it is something else.
    """
    values = parse_object(body)
    prompt = values.pop("prompt", None)
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise RefusedError(400, "malformed", "expected {'prompt_token_ids': [...]}", "prompt")
    if values.pop("logprobs", 0) not in (0, None) or values.get("stream"):
        raise RefusedError(400, "malformed", "`logprobs` of what was sampled alone, and no stream, are served")
    if values.get("top_k") == -1:  # vLLM's other word for 0
        values["top_k"] = 0
    return check_request("completion", values | {"model": "policy", "prompt": token_ids})


def generate_body(body: dict[str, Any], call: Call) -> dict[str, Any]:
    """The answer to it, from that of an OpenAI client."""
    pairs = [zip(sampled.token_ids, sampled.logprobs, strict=True) for sampled in call.sampled]
    return {
        "text": [choice["text"] for choice in body["choices"]],
        "prompt": "",
        "finish_reasons": [sampled.finish_reason for sampled in call.sampled],
        "logprobs": [[[{str(token): logprob}] for token, logprob in of_one] for of_one in pairs],
        "prompt_token_ids": call.sampled[0].prompt_ids,
        "token_ids": [sampled.token_ids for sampled in call.sampled],
    }
