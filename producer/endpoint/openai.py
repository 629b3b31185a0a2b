"""The requests that clients may send, and why the others are refused.

Guarantee: every field of a request that passes is harmless to the engine and to the meaning of its log-probs, whatever its value;
vLLM checks types and bounds. Fields that could reach files, other hosts, the scheduler or the weights of the distribution
(structured outputs, custom templates, images, priorities, token masks) are refused by name. A refusal says what to change, in a
form that OpenAI clients understand.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta

from producer.engine_contract import Adapter

Kind = Literal["chat", "completion"]
Body = TypeVar("Body")
Reason = Literal[
    "wrong_key",
    "wrong_host",
    "too_large",
    "malformed",
    "too_slow",
    "unknown_model",
    "unknown_episode",
    "not_sampled",
    "busy",
    "too_many_connections",
]
REASONS: tuple[Reason, ...] = get_args(Reason)


class RefusedError(Exception):
    """An answer of the endpoint, not a defect. `reason` is what the refusal is counted as, `parameter` the field at fault."""

    def __init__(self, status: int, reason: Reason, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.body = error_body(status, reason, message, parameter)


def malformed(message: str, parameter: str | None = None, status: int = 400) -> RefusedError:
    return RefusedError(status, "malformed", message, parameter)


def error_body(status: int, kind: str, message: str, parameter: str | None = None) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": status}}


_COMMON = """model n temperature top_p top_k min_p max_tokens stop seed stream stream_options presence_penalty
    frequency_penalty logprobs user metadata return_token_ids"""
_CHAT = "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls chat_template_kwargs"
FIELDS: dict[Kind, set[str]] = {
    "chat": {*_COMMON.split(), *_CHAT.split()},
    "completion": {*_COMMON.split(), "prompt"},
}
_EXPECTED = {
    "model": "expected the name of a model",
    "n": "expected a count",
    "metadata": "expected up to 16 texts by name",
    "stop": "expected up to 16 texts of 1 to 256 characters",
    "messages": "expected messages such as {'role': 'user', 'content': '...'}, with a text or parts of type `text`",
    "tool_choice": "only `auto` and `none` are served",
}
_Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class _Part(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Message(msgspec.Struct):
    content: str | Annotated[list[_Part], Meta(min_length=1)] | None = None


class _Fields(msgspec.Struct, kw_only=True):
    """The fields whose values are checked here."""

    model: str
    n: Annotated[int, Meta(ge=1)] = 1
    metadata: Annotated[dict[str, str], Meta(max_length=16)] = {}
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] = ""


class _ChatFields(_Fields, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tool_choice: Literal["auto", "none"] = "auto"


@dataclass(frozen=True)
class ServedRequest:
    """A request that passed."""

    kind: Kind
    model: str
    fields: dict[str, Any]  # for vLLM
    num_completions: int  # that it asks for in all
    metadata: dict[str, str]

    @property
    def streams(self) -> bool:
        return bool(self.fields.get("stream"))

    def with_fields(self, fields: dict[str, Any]) -> "ServedRequest":
        return replace(self, fields=self.fields | fields)


def check_request(kind: Kind, values: dict[str, Any]) -> ServedRequest:
    """Checks the fields of a request. Raises RefusedError if a field is not served."""
    values = {name: value for name, value in values.items() if value is not None}
    if unknown := sorted(values.keys() - FIELDS[kind]):
        raise malformed(f"not served: {', '.join(unknown)[:200]}; remove it", unknown[0][:80])
    try:
        checked = msgspec.convert(values, _ChatFields if kind == "chat" else _Fields)
    except msgspec.ValidationError as error:
        name = _field_at_fault(error) or "model"
        raise malformed(f"{_EXPECTED[name]}: {error}", name) from None
    fields = {name: value for name, value in values.items() if name not in ("model", "metadata")}
    num_completions = checked.n
    if kind == "chat":
        if "max_tokens" in fields:  # the older name
            fields.setdefault("max_completion_tokens", fields.pop("max_tokens"))
        if not fields.get("tools"):
            fields.pop("tool_choice", None)  # there is nothing to choose, which vLLM refuses
    elif isinstance(prompt := fields.get("prompt"), list) and prompt and isinstance(prompt[0], str | list):
        num_completions *= len(prompt)
    return ServedRequest(kind, checked.model, fields, num_completions, checked.metadata)


def parse_object(body: bytes) -> dict[str, Any]:
    """Reads a JSON object, without the numbers that JSON does not have. Raises RefusedError if the body is none."""
    return decode_body(body, dict[str, Any], "a JSON object")


def decode_body(body: bytes, kind: type[Body], what: str) -> Body:
    """Reads a body of a known type; no body is an empty object. Raises RefusedError if the body is not of this kind."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise malformed(f"the body is not {what}: {error}", _field_at_fault(error)) from None


def _field_at_fault(error: Exception) -> str | None:
    found = re.search(r"`\$\.(\w+)", str(error)) or re.search(r"field `(\w+)`", str(error))
    return found and found[1]


Answer = dict[str, Any] | AsyncGenerator[str, None]
"""In OpenAI's form: a whole one, or server-sent events."""


@dataclass
class Sampled:
    """One completion. The three lists have equal lengths; `finish_reason` is None unless the completion has ended
    by itself."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Call:
    """The caller pins `adapter`."""

    adapter: Adapter
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _generators: dict[str, Any] = field(default_factory=dict)  # typeshed's AsyncGenerator lacks `ag_running`
    _readers: dict[str, asyncio.Task[Any] | None] = field(default_factory=dict)
    _sampled: dict[tuple[str, int], Sampled] = field(default_factory=dict)

    def add(self, request_id: str, generator: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Adds the generator that samples for one of the call's prompts. It calls `note_reader` whenever it goes on."""
        self._generators[request_id] = generator
        return generator

    def note_reader(self, request_id: str) -> None:
        """Notes that the current task reads this generator; vLLM reads each of several prompts in tasks of its own."""
        self._readers[request_id] = asyncio.current_task()

    def of(self, request_id: str, index: int, prompt_ids: list[int]) -> Sampled:
        return self._sampled.setdefault((request_id, index), Sampled(prompt_ids))

    @property
    def sampled(self) -> list[Sampled]:
        return [self._sampled[key] for key in sorted(self._sampled)]

    @property
    def version(self) -> int:
        """The oldest version that sampled a token."""
        return min((min(each.token_versions, default=self.adapter.version) for each in self.sampled), default=-1)

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.sampled)

    @property
    def num_prompt_tokens(self) -> int:
        """Counts every prompt once."""
        return sum({request_id: len(each.prompt_ids) for (request_id, _), each in self._sampled.items()}.values())

    async def close(self) -> None:
        """Ends all generators. It tells each of them to end before it waits for the first."""
        running = [name for name, generator in self._generators.items() if generator.ag_running]
        readers = [reader for name in running if (reader := self._readers.get(name)) is not None]
        for reader in readers:  # nobody else can close what it reads
            reader.cancel()
        for generator in self._generators.values():
            if not generator.ag_running:
                await generator.aclose()
        await asyncio.gather(*readers, return_exceptions=True)


class Answering(Protocol):
    """What the endpoint needs of `producer.engine.openai_server`."""

    async def answer(self, request: ServedRequest, call: Call) -> Answer:
        """Raises RefusedError if vLLM refuses the request."""
        ...
