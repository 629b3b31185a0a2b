"""The API of Atropos' rollout server below `/atropos`, as far as environments use it (docs/environments.md), and `/generate` of
vLLM's own server.

Guarantee: `producer.plugins.atropos.atropos` gives it, over HTTP. A body is bounded before and after it is unpacked.
"""

import asyncio
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from producer.endpoint.openai import (
    Call,
    RefusedError,
    ServedRequest,
    check_request,
    decode_body,
    malformed,
    parse_object,
)
from producer.plugins.atropos.scored_data import ScoredData, ScoredGroups

if TYPE_CHECKING:
    from producer.plugins.atropos.atropos import Atropos

PREFIX = "/atropos"
_Amount = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class Registration(msgspec.Struct):
    """The report of an environment about itself, in the fields of Atropos."""

    group_size: int
    max_token_length: _Amount
    weight: _Amount
    desired_name: str | None = None
    min_batch_allocation: Any = None


def atropos_routes(atropos: "Atropos") -> list[Route]:
    def route(
        method: str, name: str, answer: Callable[[Any], dict[str, Any]], read: Callable[[bytes], Any] = bytes
    ) -> Route:
        async def respond(request: Request) -> JSONResponse:
            body, is_packed = await request.body(), "gzip" in request.headers.get("content-encoding", "").lower()
            if is_packed:
                body = await asyncio.to_thread(unzip, body, atropos.max_body_bytes)
            return JSONResponse(answer(await asyncio.to_thread(read, body)))

        return Route(f"{PREFIX}/{name}", respond, methods=[method])

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({}, 200 if atropos.is_ready else 503)

    def register(body: bytes) -> dict[str, Any]:
        return atropos.register(decode_body(body, Registration, "the registration of an environment of Atropos"))

    def one(body: bytes) -> list[ScoredData]:
        return [decode_body(body, ScoredData, "the scored data of Atropos")]

    def several(body: bytes) -> list[ScoredData]:
        return decode_body(body, ScoredGroups, "the scored data of Atropos")

    return [
        route("POST", "register-env", register),
        route("POST", "disconnect-env", lambda body: atropos.disconnect(parse_object(body).get("env_id"))),
        route("POST", "scored_data", atropos.post, one),
        route("POST", "scored_data_list", atropos.post, several),
        route("GET", "wandb_info", lambda _: atropos.names),
        route("GET", "info", lambda _: atropos.info),
        route("GET", "status", lambda _: atropos.status()),
        route("GET", "status-env", lambda body: atropos.status(parse_object(body).get("env_id"))),
        Route(f"{PREFIX}/health", health),
    ]


def unzip(body: bytes, limit: int) -> bytes:
    """Unpack a body. Raise RefusedError if it is no gzip, or has more than `limit` bytes of text."""
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


class _Prompt(msgspec.Struct):
    prompt_token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]


class _Generate(msgspec.Struct):
    prompt: _Prompt
    logprobs: Literal[0] | None = None
    stream: Literal[False] | None = None


def parse_generate(body: bytes) -> ServedRequest:
    """Parse a request to `/generate` of vLLM's own server: token ids, and the fields of its SamplingParams. Raise RefusedError
    if the body is none."""
    expected = "{'prompt': {'prompt_token_ids': [...]}, ...} with `logprobs` of what is sampled alone and no stream"
    prompt = decode_body(body, _Generate, expected).prompt.prompt_token_ids
    values = parse_object(body) | {"model": "policy", "prompt": prompt, "logprobs": None}
    if values.get("top_k") == -1:  # vLLM means 0 by it
        values["top_k"] = 0
    return check_request("completion", values)


def generate_body(body: dict[str, Any], call: Call) -> dict[str, Any]:
    """Return the answer to a request to `/generate`, made of the answer that an OpenAI client gets."""
    pairs = [zip(sampled.token_ids, sampled.logprobs, strict=True) for sampled in call.sampled]
    return {
        "text": [choice["text"] for choice in body["choices"]],
        "prompt": "",
        "finish_reasons": [sampled.finish_reason for sampled in call.sampled],
        "logprobs": [[[{str(token): logprob}] for token, logprob in of_one] for of_one in pairs],
        "prompt_token_ids": call.sampled[0].prompt_ids,
        "token_ids": [sampled.token_ids for sampled in call.sampled],
    }
