"""The bodies of requests and answers of Atropos' rollout server, and of `/generate` of vLLM's own server.

Guarantee: a body is bounded before and after it is unpacked.
"""

import zlib
from typing import Annotated, Any, Literal

import msgspec

from slipstream_extras.endpoint.openai import (
    Call,
    RefusedError,
    ServedRequest,
    check_request,
    decode_body,
    malformed,
    parse_object,
)

_Amount = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class Registration(msgspec.Struct):
    """The report of an environment about itself, in the fields of Atropos."""

    group_size: int
    max_token_length: _Amount
    weight: _Amount
    desired_name: str | None = None
    min_batch_allocation: Any = None


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
