"""Requests in two more dialects: Anthropic's Messages and OpenAI's Responses.

Guarantee: a request that passes says what a chat request can say: texts, function tools with their calls and results, and how to
sample. State on the server, tools that run there, images and budgets of thinking are refused by name. The engine gets the fields
that were checked here, and of messages and tools only what the chat template may show: marks of caches and labels are left out.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from slipstream_extras.endpoint.openai import ServedRequest, Stop, checked, malformed

_KIND_OF_ERROR = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
}


def anthropic_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return an error of OpenAI's form in Anthropic's."""
    kind = _KIND_OF_ERROR.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any

    def __post_init__(self) -> None:
        if not isinstance(self.input, dict):  # a client parses what a stream brings, and sends it back
            self.input = {"INVALID_JSON": msgspec.json.encode(self.input).decode()}


class _ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] = ""


class _Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Text | _ToolUse | _ToolResult]


class _Tool(msgspec.Struct, omit_defaults=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom", None] = None


class _ToolChoice(msgspec.Struct, omit_defaults=True):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool = False


class _Thinking(msgspec.Struct):
    type: Literal["disabled", "adaptive"]


class _Output(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None


class _Messages(msgspec.Struct, kw_only=True):
    """Fields of a request for messages."""

    model: str
    messages: Annotated[list[_Turn], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    system: str | list[_Text] | UnsetType = UNSET
    tools: list[_Tool] | UnsetType = UNSET
    tool_choice: _ToolChoice | UnsetType = UNSET
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | UnsetType = UNSET
    stream: bool = False
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    metadata: Annotated[dict[str, str], Meta(max_length=16)] = {}
    thinking: _Thinking | None = None
    output_config: _Output | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"


_OF_MESSAGES = {
    "messages": "expected turns of texts, `tool_use` and `tool_result` with texts",
    "system": "expected a text or blocks of type `text`",
    "tools": "expected tools that the client runs, with `name` and `input_schema`",
    "tool_choice": "only `auto` and `none` are served",
    "stop_sequences": "expected up to 16 texts of 1 to 256 characters",
    "thinking": "only `disabled` and `adaptive` are served, which change nothing: the chat template decides",
    "output_config": "only `effort` is served, which changes nothing: the chat template decides",
}


def check_messages(values: dict[str, Any]) -> ServedRequest:
    """Check a request for Anthropic's messages. Raises RefusedError if a field is not served."""
    request = checked(values, _Messages, _OF_MESSAGES)
    fields = msgspec.to_builtins(request)
    for name in ("model", "metadata", "thinking", "output_config", "service_tier"):
        del fields[name]
    fields["max_completion_tokens"] = fields.pop("max_tokens")
    if "stop_sequences" in fields:
        fields["stop"] = fields.pop("stop_sequences")
    if not fields.get("tools"):
        fields.pop("tool_choice", None)
    return ServedRequest("messages", request.model, fields, 1, request.metadata)


class _Part(msgspec.Struct):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Item(msgspec.Struct, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]


class _Called(msgspec.Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _Returned(msgspec.Struct, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[_Part]


class _Function(msgspec.Struct, tag_field="type", tag="function"):
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: None = None
    summary: Literal["auto", "concise", "detailed", None] = None


class _Plain(msgspec.Struct):
    type: Literal["text"] = "text"


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    format: _Plain | None = None


class _Responses(msgspec.Struct, kw_only=True):
    """Fields of a request for responses."""

    model: str
    input: str | Annotated[list[_Item | _Called | _Returned], Meta(min_length=1)]
    instructions: str = ""
    tools: list[_Function] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_logprobs: int | UnsetType = UNSET
    stream: bool = False
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = []
    store: bool = False
    reasoning: _Reasoning | None = None
    text: _Form | None = None
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["auto", "default"] = "auto"
    metadata: Annotated[dict[str, str], Meta(max_length=16)] = {}
    client_metadata: dict[str, Any] = {}
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""


_SAMPLING = (
    "tool_choice",
    "parallel_tool_calls",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_logprobs",
    "stream",
)
_OF_RESPONSES = {
    "input": "expected a text, or messages of texts, `function_call` and `function_call_output`",
    "tools": "expected tools of type `function`, which the client runs",
    "tool_choice": "only `auto` and `none` are served",
    "include": "only log-probs are served, and reasoning, which no answer has apart from its text",
    "reasoning": "no effort is served: the chat template decides",
    "text": "only plain text is served",
}


def check_responses(values: dict[str, Any]) -> ServedRequest:
    """Check a request for OpenAI's responses. Raises RefusedError if a field is not served."""
    if isinstance(items := values.get("input"), list):
        values = values | {"input": [{"type": "message"} | item if isinstance(item, dict) else item for item in items]}
    request = checked(values, _Responses, _OF_RESPONSES)
    if request.store:
        raise malformed("nothing is stored; send `store: false`, and the whole conversation as `input`", "store")
    fields = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not UNSET}
    fields["tools"] = msgspec.to_builtins(request.tools)
    fields["include"] = [name for name in request.include if name.endswith("logprobs")]
    leading, fields["input"] = [request.instructions] if request.instructions else [], request.input
    if isinstance(request.input, list):
        rest = list(request.input)
        while rest and isinstance(first := rest[0], _Item) and first.role in ("system", "developer"):
            leading.append(_flat(first.content))  # many templates take one system message, at the start
            del rest[0]
        fields["input"] = [_built(item) for item in rest]
    fields["instructions"] = "\n\n".join(leading)
    return ServedRequest("responses", request.model, fields, 1, request.metadata)


def _flat(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _built(item: _Item | _Called | _Returned) -> dict[str, Any]:
    if isinstance(item, _Item):
        return {"role": item.role, "content": _flat(item.content)}
    if isinstance(item, _Returned):
        return {"type": "function_call_output", "call_id": item.call_id, "output": _flat(item.output)}
    return {"type": "function_call"} | msgspec.structs.asdict(item)
