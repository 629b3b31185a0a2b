"""What clients may ask for, and in which words the rest is refused."""

import pytest

from slipstream_extras.endpoint.openai import RefusedError, check_request, parse_object

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def test_what_passes_is_handed_on_without_what_is_ours():
    body = CHAT | {
        "n": 3,
        "max_tokens": 5,
        "stop": ["."],
        "temperature": None,
        "stream": True,
        "metadata": {"episode": "a"},
        "session_id": "b",
    }
    request = check_request("chat", body)
    expected = {"messages": CHAT["messages"], "n": 3, "max_completion_tokens": 5, "stop": ["."], "stream": True}
    assert request.fields == expected
    assert (request.model, request.num_completions) == ("policy", 3)
    assert (request.metadata, request.session_id) == ({"episode": "a"}, "b")


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": None}])
def test_how_to_choose_among_no_tools_says_nothing(tools):
    request = check_request("chat", CHAT | tools | {"tool_choice": "auto"})
    assert "tool_choice" not in request.fields


def test_how_to_choose_among_tools_is_handed_on():
    tools = [{"type": "function", "function": {"name": "look"}}]
    request = check_request("chat", CHAT | {"tools": tools, "tool_choice": "auto"})
    assert (request.fields["tools"], request.fields["tool_choice"]) == (tools, "auto")


@pytest.mark.parametrize(("prompt", "count"), [("a", 2), (["a", "b"], 4), ([1, 2, 3], 2), ([[1], [2], [3]], 6)])
def test_every_prompt_counts(prompt, count):
    body = {"model": "policy", "prompt": prompt, "n": 2}
    assert check_request("completion", body).num_completions == count


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"guided_regex": "a*", "priority": -1}, "not served: guided_regex, priority; remove it"),
        ({"response_format": {"type": "json_object"}}, "not served: response_format"),
        ({"model": 3}, "expected the name of a model"),
        ({"n": 0}, "expected a count"),
        ({"n": True}, "expected a count"),
        ({"messages": "hi"}, "expected messages such as"),
        ({"messages": []}, "expected messages such as"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "parts of type `text`: Expected `str | array | null`, got `int`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "parts of type `text`: Invalid value 'image_url'",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "only `auto` and `none` are served"),
        ({"tool_choice": "required"}, "only `auto` and `none` are served"),
        ({"stop": [""]}, "expected up to 16 texts of 1 to 256 characters"),
        ({"stop": ["a"] * 17}, "expected up to 16 texts"),
        ({"session_id": 1}, "expected a text"),
        ({"metadata": {"a": 1}}, "expected up to 16 texts by name"),
    ],
)
def test_the_rest_is_refused_by_name(changes, said):
    with pytest.raises(RefusedError, match=said) as refused:
        check_request("chat", CHAT | changes)
    assert (refused.value.status, refused.value.reason) == (400, "malformed")


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"3", b'{"temperature": NaN}', b'{"temperature": 1e999}', b"\xff{}", b"[" * 100_000]
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(RefusedError):
        parse_object(body)
