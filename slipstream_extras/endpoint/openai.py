"""Requests of OpenAI's clients: the fields that they may send, and one request in the engine with its samples.

Guarantee: every field of a request that passes is harmless to the engine and to the meaning of its log-probs, whatever its value;
vLLM checks types and bounds. Fields that could reach files, other hosts, the scheduler or the weights of the distribution
(structured outputs, custom templates, images, priorities, token masks) are refused by name. A refusal names the fix, in a form
that OpenAI clients understand. Every sampled token is kept with its log-prob and the policy version that sampled it. After
`Call.close` nothing of the call is in the engine.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta
from starlette.routing import Route

from producer.engine_contract import Adapter
from protocol.runtime.metrics import Readings

Kind = Literal["chat", "completion", "messages", "responses"]
LENGTHS: dict[Kind, str] = {
    "chat": "max_completion_tokens",
    "completion": "max_tokens",
    "messages": "max_completion_tokens",
    "responses": "max_output_tokens",
}
"""The field that bounds an answer, as a request of each kind has it once it passed."""
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
    """A refusal by the endpoint, which is no defect. It is counted by `reason`; `parameter` is the field at fault."""

    def __init__(self, status: int, reason: Reason, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.body = error_body(status, reason, message, parameter)


def malformed(message: str, parameter: str | None = None, status: int = 400) -> RefusedError:
    return RefusedError(status, "malformed", message, parameter)


def error_body(status: int, kind: str, message: str, parameter: str | None = None) -> dict[str, Any]:
    """Build the body of an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": status}}


_COMMON = """model n temperature top_p top_k min_p max_tokens stop seed stream stream_options presence_penalty
    frequency_penalty logprobs user metadata session_id return_token_ids"""
_CHAT = "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls chat_template_kwargs"
_FIELDS = {"chat": {*_COMMON.split(), *_CHAT.split()}, "completion": {*_COMMON.split(), "prompt"}}
_EXPECTED = {
    "model": "expected the name of a model",
    "n": "expected a count",
    "metadata": "expected up to 16 texts by name",
    "session_id": "expected a text",
    "stop": "expected up to 16 texts of 1 to 256 characters",
    "messages": "expected messages such as {'role': 'user', 'content': '...'}, with a text or parts of type `text`",
    "tool_choice": "only `auto` and `none` are served",
}
Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class _Part(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Message(msgspec.Struct):
    content: str | Annotated[list[_Part], Meta(min_length=1)] | None = None


class _Fields(msgspec.Struct, kw_only=True):
    """Fields whose values are checked here, not by vLLM."""

    model: str
    n: Annotated[int, Meta(ge=1)] = 1
    metadata: Annotated[dict[str, str], Meta(max_length=16)] = {}
    session_id: str | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] = ""


class _ChatFields(_Fields, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tool_choice: Literal["auto", "none"] = "auto"


@dataclass(frozen=True)
class ServedRequest:
    """A request that passed. It asks for `num_completions` in all; `fields` are those for vLLM."""

    kind: Kind
    model: str
    fields: dict[str, Any]
    num_completions: int
    metadata: dict[str, str]
    session_id: str | None = None

    def with_fields(self, fields: dict[str, Any]) -> "ServedRequest":
        return replace(self, fields=self.fields | fields)


def check_request(kind: Literal["chat", "completion"], values: dict[str, Any]) -> ServedRequest:
    """Check the fields of a request. Raises RefusedError if a field is not served."""
    request = checked(values, _ChatFields if kind == "chat" else _Fields, _EXPECTED, _FIELDS[kind])
    left_out = ("model", "metadata", "session_id")
    fields = {name: value for name, value in values.items() if value is not None and name not in left_out}
    num_completions = request.n
    if kind == "chat":
        if "max_tokens" in fields:  # the older name
            fields.setdefault("max_completion_tokens", fields.pop("max_tokens"))
        if not fields.get("tools"):
            fields.pop("tool_choice", None)  # there is nothing to choose, which vLLM refuses
    elif isinstance(prompt := fields.get("prompt"), list) and prompt and isinstance(prompt[0], str | list):
        num_completions *= len(prompt)
    return ServedRequest(kind, request.model, fields, num_completions, request.metadata, request.session_id)


def checked(
    values: Mapping[str, Any], kind: type[Body], expected: Mapping[str, str], served: set[str] | None = None
) -> Body:
    """Read the fields of a request, which are those of `kind` unless `served` names them. Raises RefusedError, with the text of
    `expected` for a field whose value has another type, if one is not served."""
    values = {name: value for name, value in values.items() if value is not None}
    if unknown := sorted(values.keys() - (served or set(kind.__annotations__))):
        raise malformed(f"not served: {', '.join(unknown)[:200]}; remove it", unknown[0][:80])
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        name = _field_at_fault(error) or "model"
        raise malformed(f"{expected.get(name) or _EXPECTED.get(name, name)}: {error}", name) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object, without the numbers that JSON does not have. Raises RefusedError if the body is none."""
    return decode_body(body, dict[str, Any], "a JSON object")


def decode_body(body: bytes, kind: type[Body], what: str) -> Body:
    """Read a body of a known type; an empty body is an empty object. Raises RefusedError if the body has another type."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise malformed(f"the body is not {what}: {error}", _field_at_fault(error)) from None


def _field_at_fault(error: Exception) -> str | None:
    found = re.search(r"`\$\.(\w+)", str(error)) or re.search(r"field `(\w+)`", str(error))
    return found and found[1]


Answer = dict[str, Any] | AsyncGenerator[str, None]
"""An answer in OpenAI's form: a whole one, or server-sent events."""


@dataclass
class Sampled:
    """A completion. Its lists of tokens, log-probs and versions have equal lengths.
    `finish_reason` is None unless the completion has ended by itself."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Call:
    """A request in the engine. The caller pins `adapter`."""

    adapter: Adapter
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _generators: dict[str, Any] = field(default_factory=dict)  # typeshed's AsyncGenerator lacks `ag_running`
    _readers: dict[str, asyncio.Task[Any] | None] = field(default_factory=dict)
    _sampled: dict[tuple[str, int], Sampled] = field(default_factory=dict)

    def add(self, request_id: str, generator: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Add the generator that samples for one of the call's prompts. It calls `note_reader` whenever it goes on."""
        self._generators[request_id] = generator
        return generator

    def note_reader(self, request_id: str) -> None:
        """Note that the current task reads this generator; vLLM reads each of several prompts in another task."""
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
        """The number of tokens of all prompts, each counted once."""
        return sum({request_id: len(each.prompt_ids) for (request_id, _), each in self._sampled.items()}.values())

    async def close(self) -> None:
        """End all generators: cancel each reader first, then wait for all."""
        running = [name for name, generator in self._generators.items() if generator.ag_running]
        readers = [reader for name in running if (reader := self._readers.get(name)) is not None]
        for reader in readers:  # no other task can close the generator that it reads
            reader.cancel()
        for generator in self._generators.values():
            if not generator.ag_running:
                await generator.aclose()
        await asyncio.gather(*readers, return_exceptions=True)


class Answering(Protocol):
    """An engine's OpenAI API, such as `slipstream_extras.endpoint.openai_server`."""

    async def answer(self, request: ServedRequest, call: Call) -> Answer:
        """Generate. Raises RefusedError if the engine refuses the request."""
        ...


class Recorder(Protocol):
    """A place for the samples of a call. `floor` is the oldest policy that may sample them."""

    @property
    def floor(self) -> int: ...

    def note(self, sampled: Sampled) -> None: ...


BodyOf = Callable[[dict[str, Any], Call], dict[str, Any]]
"""Makes the body of an answer from the body for an OpenAI client."""

Generating = Callable[[str, Callable[[bytes], ServedRequest], BodyOf], Route]
"""Makes a route by which requests generate, given its path, the parser of their bodies, and `BodyOf`."""


class EndpointPlugin(Protocol):
    """An API of another project below a path, whose clients sample, and post groups of their samples. An entry point of the group
    `slipstream.environments` that `environment.agent` names makes it from the configuration, the longest sequence of the engine
    and a function that returns the version of the present policy."""

    prefix: str
    max_body_bytes: int

    def routes(self, generating: Generating) -> list[Route]:
        """Return the routes below `prefix`, besides those of OpenAI."""

    def prepare(self, request: ServedRequest) -> tuple[Recorder | None, ServedRequest]:
        """Return the recorder of a request, if it may be trained, and the request to generate."""

    def watch(self, readings: Readings) -> None:
        """Add metrics."""

    def forget(self) -> None:
        """Forget all samples: another trainer process may give their versions to other weights."""

    def rollouts(self, access: Any, reward_names: tuple[str, ...]) -> Any:
        """Return the `RolloutSource` of the run, given its `EngineAccess`."""
