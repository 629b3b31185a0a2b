"""Tool calls in what the model sampled, found by vLLM's parsers.

Guarantee: what a parser cannot read is content without calls; arguments are a mapping or said to be none.
"""

import json
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from producer.interfaces import ToolCall
from protocol.errors import ConfigError


class ToolCallParser:
    """vLLM's parser `name`, for these tools. Raises ConfigError if there is none, or if it does not go with this tokenizer."""

    def __init__(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> None:
        known = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
        if name not in known:
            raise ConfigError(f"environment.tool_parser: vLLM has no parser {name!r}; it has {', '.join(known)}")
        self._tokenizer = tokenizer
        request = ChatCompletionRequest(model="policy", messages=[{"role": "user", "content": ""}], tools=tools)
        try:
            self._parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
            self._request = self._parser.adjust_request(request)
        except Exception as error:
            raise ConfigError(f"environment.tool_parser: {name} does not go with this model: {error}") from error

    def parse(self, token_ids: list[int]) -> tuple[str, list[ToolCall]]:
        """Content and calls of a turn, given without its end-of-turn token."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._request.skip_special_tokens)
        found = self._parser.extract_tool_calls(text, self._request)
        if not found.tools_called:
            return text, []
        calls = [ToolCall(call.function.name, _arguments(call.function.arguments)) for call in found.tool_calls]
        return found.content or "", calls


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
