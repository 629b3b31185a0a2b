"""Parsers of tool calls raise at what a model writes, and models write what no process can be sent."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from producer.engine_contract import ToolCall
from protocol.errors import ConfigError

MODULE = "producer.engine.tool_calls"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Tokenizer:
    """One token per character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: object) -> str:
        assert isinstance(skip_special_tokens, bool)
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token]
        return "".join(map(chr, token_ids))

    def get_vocab(self) -> dict[str, int]:
        return {}


class Parser:
    """Finds one call, whose arguments are the text."""

    def __init__(self, _tokenizer: Any, _tools: Any) -> None: ...

    def adjust_request(self, request: Any) -> Any:
        return request

    def extract_tool_calls(self, text: str, _request: Any) -> Any:
        if text == "raise":
            raise IndexError("list index out of range")
        function = SimpleNamespace(name="add\ud800", arguments=text)
        return SimpleNamespace(
            tools_called=bool(text), content="\udfff" * bool(text), tool_calls=[SimpleNamespace(function=function)]
        )


class Stub(Parser):
    def extract_tool_calls(self, text: str, _request: Any) -> Any:
        raise NotImplementedError("a stub")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Parser]], Any]]:
    """Makes a `ToolCallParser` around a parser, without vLLM."""
    names = "vllm vllm.tool_parsers vllm.entrypoints vllm.entrypoints.openai vllm.entrypoints.openai.chat_completion "
    for name in f"{names} vllm.entrypoints.openai.chat_completion.protocol".split():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    request = sys.modules["vllm.entrypoints.openai.chat_completion.protocol"]
    request.ChatCompletionRequest = lambda **_: SimpleNamespace(tools=TOOLS, skip_special_tokens=True)  # type: ignore[attr-defined]
    manager = SimpleNamespace(tool_parsers={"hermes": 0}, lazy_parsers={})
    sys.modules["vllm.tool_parsers"].ToolParserManager = manager  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)

    def make(parser: type[Parser]) -> Any:
        manager.get_tool_parser = lambda name: parser
        return module.ToolCallParser("hermes", Tokenizer(), TOOLS)

    yield make
    del sys.modules[MODULE]


@pytest.fixture
def parsed(made: Callable[[type[Parser]], Any]) -> Any:
    parser = made(Parser)
    return lambda text: parser.parse(list(map(ord, text)))


def test_a_turn_at_which_a_parser_raises_is_content(parsed: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert parsed("raise") == ("raise", [])
    assert "environment.tool_parser: hermes raised IndexError" in caplog.text


@pytest.mark.parametrize(
    "arguments", ["[1]", "nonsense", '{"a": 1e', '{"a": 100000000000000000000}', '{"a": "\\ud800"}', "[" * 20_000]
)
def test_arguments_that_no_process_can_be_sent_are_none(parsed: Any, arguments: str) -> None:
    content, [(name, found)] = parsed(arguments)
    assert found is None
    msgspec.msgpack.encode([content, name])


@pytest.mark.parametrize(("said", "content"), [(True, "ab"), (False, "a\0b"), (None, "ab")])
def test_a_turn_has_special_tokens_only_where_the_parser_wants_them(
    made: Callable[[type[Parser]], Any], said: bool | None, content: str
) -> None:
    class Untouched(Parser):
        def adjust_request(self, request: Any) -> Any:
            request.skip_special_tokens = said
            return request

        def extract_tool_calls(self, text: str, _request: Any) -> Any:
            return SimpleNamespace(tools_called=False, tool_calls=[])

    assert made(Untouched).parse([ord("a"), 0, ord("b")]) == (content, [])


def test_arguments_arrive(parsed: Any) -> None:
    assert parsed('{"a": 1, "b": [{"c": "\\u00e9"}]}')[1] == [ToolCall("add?", {"a": 1, "b": [{"c": "\u00e9"}]})]


def test_a_parser_that_is_a_stub_is_refused_at_the_start(made: Callable[[type[Parser]], Any]) -> None:
    with pytest.raises(ConfigError, match=r"environment\.tool_parser: hermes .* a stub"):
        made(Stub)
