"""The requests that clients may send.

Guarantee: every field of a request that passes is harmless to the engine and to the meaning of its log-probs, whatever its value;
vLLM checks types and bounds. Fields that could reach files, other hosts, the scheduler or the weights of
the distribution (structured outputs, custom templates, images, priorities, token masks) are refused by name.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from producer.calls.refusals import malformed

Kind = Literal["chat", "completion"]
Body = TypeVar("Body")

_COMMON = """model n temperature top_p top_k min_p max_tokens stop seed stream stream_options presence_penalty
    frequency_penalty logprobs user metadata return_token_ids"""
_CHAT = "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls chat_template_kwargs"
FIELDS: dict[Kind, set[str]] = {
    "chat": {*_COMMON.split(), *_CHAT.split()},
    "completion": {*_COMMON.split(), "prompt"},
}
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 256
_MAX_METADATA = 16


@dataclass(frozen=True)
class ServedRequest:
    """A request that passed.

    Args:
        fields: for vLLM.
        num_completions: how many completions it asks for in all.
    """

    kind: Kind
    model: str
    fields: dict[str, Any]
    num_completions: int
    metadata: dict[str, str]

    @property
    def streams(self) -> bool:
        return bool(self.fields.get("stream"))

    def with_fields(self, fields: dict[str, Any]) -> "ServedRequest":
        return replace(self, fields=self.fields | fields)


def parse_request(kind: Kind, body: bytes) -> ServedRequest:
    """Checks the body of a request.

    Raises:
        RefusedError: the body is no JSON object, or has a field that is not served.
    """
    return check_request(kind, parse_object(body))


def check_request(kind: Kind, values: dict[str, Any]) -> ServedRequest:
    """Checks the fields of a request.

    Raises:
        RefusedError: a field is not served.
    """
    values = {name: value for name, value in values.items() if value is not None}
    if unknown := sorted(values.keys() - FIELDS[kind]):
        raise malformed(f"not served: {', '.join(unknown)[:200]}; remove it", unknown[0][:80])
    model = values.pop("model", None)
    if not isinstance(model, str):
        raise malformed("expected the name of a model", "model")
    metadata = values.pop("metadata", {})
    if not isinstance(metadata, dict) or len(metadata) > _MAX_METADATA or not all(map(_is_text, metadata.values())):
        raise malformed(f"expected up to {_MAX_METADATA} texts by name", "metadata")
    num_completions = values.get("n", 1)
    if type(num_completions) is not int or num_completions < 1:
        raise malformed("expected a count", "n")
    if kind == "chat":
        if "max_tokens" in values:  # the older name
            values.setdefault("max_completion_tokens", values.pop("max_tokens"))
        _check_messages(values)
        if not values.get("tools"):
            values.pop("tool_choice", None)  # there is nothing to choose, which vLLM refuses
    elif isinstance(prompt := values.get("prompt"), list) and prompt and isinstance(prompt[0], str | list):
        num_completions *= len(prompt)
    _check_stops(values.get("stop", []))
    return ServedRequest(kind, model, values, num_completions, metadata)


def parse_object(body: bytes) -> dict[str, Any]:
    """Reads a JSON object, without the numbers that JSON does not have.

    Raises:
        RefusedError: the body is none.
    """
    return decode_body(body or b"{}", dict[str, Any], "a JSON object")


def decode_body(body: bytes, kind: type[Body], what: str) -> Body:
    """Reads a body of a known type.

    Raises:
        RefusedError: the body is not of this kind.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise malformed(f"the body is not {what}: {error}") from None


def _check_messages(values: dict[str, Any]) -> None:
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise malformed("expected a list of messages", "messages")
    for message in messages:
        if not isinstance(message, dict):
            raise malformed("expected messages such as {'role': 'user', 'content': '...'}", "messages")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise malformed("only parts of type `text` are served", "messages")
        if not parts and not isinstance(content, str | None):
            raise malformed("expected a text, or parts of type `text`", "messages")
    if not isinstance(choice := values.get("tool_choice", "auto"), str) or choice not in ("auto", "none"):
        raise malformed("only `auto` and `none` are served", "tool_choice")


def _check_stops(stops: Any) -> None:
    texts = [stops] if isinstance(stops, str) else stops
    if not isinstance(texts, list) or len(texts) > _MAX_STOPS or not all(map(_is_short, texts)):
        raise malformed(f"expected up to {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARACTERS} characters", "stop")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _MAX_STOP_CHARACTERS
