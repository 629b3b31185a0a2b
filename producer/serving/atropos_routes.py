"""The API of Atropos' rollout server below `/atropos`, as far as environments use it (docs/environments.md).

Guarantee: that of `producer.environments.atropos`, over HTTP. A body is bounded before and after it is unpacked.
"""

import zlib
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from producer.calls.calls import Call
from producer.calls.refusals import RefusedError, malformed
from producer.calls.requests import ServedRequest, check_request, parse_object
from producer.environments.atropos import Atropos
from producer.environments.registrations import parse_registration
from producer.environments.scored_data import parse_scored_data
from producer.serving.http_parts import App, ReadBody

PREFIX = "/atropos"


def atropos_routes(atropos: Atropos, read_body: ReadBody) -> list[Route]:
    def route(method: str, name: str, answer: Callable[[bytes], dict[str, Any]]) -> Route:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            body = await read_body(scope, receive)
            if "gzip" in Headers(scope=scope).get("content-encoding", "").lower():
                body = unzip(body, atropos.max_body_bytes)
            await JSONResponse(answer(body))(scope, receive, send)

        return Route(f"{PREFIX}/{name}", App(app), methods=[method])

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({}, 200 if atropos.is_ready else 503)(scope, receive, send)

    return [
        route("POST", "register-env", lambda body: atropos.register(parse_registration(body))),
        route("POST", "disconnect-env", lambda body: atropos.disconnect(parse_object(body).get("env_id"))),
        route("POST", "scored_data", lambda body: atropos.post(parse_scored_data(body, is_list=False))),
        route("POST", "scored_data_list", lambda body: atropos.post(parse_scored_data(body, is_list=True))),
        route("GET", "wandb_info", lambda _: atropos.names),
        route("GET", "info", lambda _: atropos.info),
        route("GET", "status", lambda _: atropos.status()),
        route("GET", "status-env", lambda body: atropos.status(parse_object(body).get("env_id"))),
        Route(f"{PREFIX}/health", App(health), methods=["GET"]),
    ]


def unzip(body: bytes, limit: int) -> bytes:
    """
    Raises:
        RefusedError: the body is no gzip, or has more than `limit` bytes of text.
    """
    unpacking = zlib.decompressobj(wbits=31)
    try:
        text = unpacking.decompress(body, limit)
    except zlib.error as error:
        raise malformed(f"the body is not gzip: {error}") from None
    if unpacking.unconsumed_tail:
        raise RefusedError(413, "too_large", f"the body has more than {limit} bytes; raise serve.max_request_bytes")
    if not unpacking.eof:
        raise malformed("the body is not gzip: it ends too early")
    return text


def parse_generate(body: bytes) -> ServedRequest:
    """Reads a request to `/generate` of vLLM's own server: token ids, and the fields of its SamplingParams.

    Raises:
        RefusedError: the body is something else.
    """
    values = parse_object(body)
    prompt = values.pop("prompt", None)
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise malformed("expected {'prompt_token_ids': [...]}", "prompt")
    if values.pop("logprobs", 0) not in (0, None) or values.get("stream"):
        raise malformed("`logprobs` of what was sampled alone, and no stream, are served")
    if values.get("top_k") == -1:  # vLLM means 0 by it
        values["top_k"] = 0
    return check_request("completion", values | {"model": "policy", "prompt": token_ids})


def generate_body(body: dict[str, Any], call: Call) -> dict[str, Any]:
    """Returns the answer to such a request, made of the one that an OpenAI client gets."""
    pairs = [zip(sampled.token_ids, sampled.logprobs, strict=True) for sampled in call.sampled]
    return {
        "text": [choice["text"] for choice in body["choices"]],
        "prompt": "",
        "finish_reasons": [sampled.finish_reason for sampled in call.sampled],
        "logprobs": [[[{str(token): logprob}] for token, logprob in of_one] for of_one in pairs],
        "prompt_token_ids": call.sampled[0].prompt_ids,
        "token_ids": [sampled.token_ids for sampled in call.sampled],
    }
