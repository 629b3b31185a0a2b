"""Tool calls in a sampled turn, found by vLLM's parsers.

Guarantee: a turn that a parser cannot read, or raises at, is content without calls; arguments are a mapping that can be sent to a
process, or None.
"""

import json
import logging
from typing import Any

import msgspec
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from producer.engine_contract import ToolCall
from protocol.errors import ConfigError
from protocol.runtime.logs import Throttle

logger = logging.getLogger(__name__)


class ToolCallParser:
    """vLLM's parser `name`, for these tools. Raises ConfigError if vLLM has none, or if it cannot be used with this tokenizer."""

    def __init__(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> None:
        known = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
        if name not in known:
            raise ConfigError(f"environment.tool_parser: vLLM has no parser {name!r}; it has {', '.join(known)}")
        self._name, self._tokenizer, self._warn = name, tokenizer, Throttle(logger)
        request = ChatCompletionRequest(model="policy", messages=[{"role": "user", "content": ""}], tools=tools)
        try:
            self._parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
            self._request = self._parser.adjust_request(request)
            self._parser.extract_tool_calls("", self._request)  # some of vLLM's parsers are stubs
        except Exception as error:
            raise ConfigError(f"environment.tool_parser: {name} cannot be used with this model: {error}") from error

    def parse(self, token_ids: list[int]) -> tuple[str, list[ToolCall]]:
        """Return content and calls of a turn, given without its end-of-turn token."""
        skips = self._request.skip_special_tokens is not False  # None, which vLLM 0.33 begins with, is True
        text = self._tokenizer.decode(token_ids, skip_special_tokens=skips)
        try:
            found = self._parser.extract_tool_calls(text, self._request)
            calls = [
                ToolCall(_sendable(call.function.name), _arguments(call.function.arguments))
                for call in found.tool_calls
            ]
        except Exception as error:  # vLLM's parsers raise at some turns
            self._warn(
                type(error).__name__,
                f"environment.tool_parser: {self._name} raised {type(error).__name__}: {error!s:.200}; the turn counts as "
                f"content without calls: {text!r:.200}",
            )
            return text, []
        if not found.tools_called:
            return text, []
        return _sendable(found.content or ""), calls


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        msgspec.msgpack.encode(value)  # it refuses numbers of more than 64 bits and halves of characters
    except (ValueError, OverflowError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _sendable(text: str) -> str:
    """Replace halves of characters, which a parser may have read from escapes of JSON."""
    return text.encode(errors="replace").decode()
