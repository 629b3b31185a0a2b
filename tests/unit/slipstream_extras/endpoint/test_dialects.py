"""Requests of Anthropic's and OpenAI's newer clients, and the form in which the rest is refused."""

import json

import pytest

from protocol.wire.messages import Sampling
from slipstream_extras.endpoint.agents import as_in_training
from slipstream_extras.endpoint.dialects import check_messages, check_responses
from slipstream_extras.endpoint.openai import RefusedError
from tests.unit.producer.loop import asynchronous
from tests.unit.slipstream_extras.endpoint.test_endpoint import KEY, endpoint

MESSAGES = {"model": "policy", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
RESPONSES = {"model": "policy", "input": "hi"}


def text(said: str, **more):
    return {"type": "text", "text": said} | more


def test_messages_as_claude_code_sends_them_keep_what_a_template_shows():
    call = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a.py")], "is_error": False}
    messages = [
        {"role": "user", "content": [text("hi", cache_control={"type": "ephemeral"})]},
        {"role": "system", "content": "where you are"},
        {"role": "assistant", "content": [text("so"), call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [call | {"input": [1, "a"]}]},
        {"role": "user", "content": [result | {"content": "Expected an object.", "is_error": True}]},
    ]
    tool = {"name": "Bash", "description": "runs", "input_schema": {"type": "object"}, "strict": True}
    body = MESSAGES | {
        "messages": messages,
        "system": [text("be brief", cache_control={"type": "ephemeral"})],
        "tools": [tool],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "stop_sequences": ["END"],
        "stream": True,
        "temperature": 1,
        "top_k": None,
    }
    request = check_messages(body)
    assert request.fields == {
        "messages": [
            {"role": "user", "content": [text("hi")]},
            {"role": "system", "content": "where you are"},
            {"role": "assistant", "content": [text("so"), call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [text("a.py")]}]},
            {"role": "assistant", "content": [call | {"input": {"INVALID_JSON": '[1,"a"]'}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Expected an object."}],
            },
        ],
        "system": [text("be brief")],
        "tools": [{"name": "Bash", "description": "runs", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop": ["END"],
        "stream": True,
        "temperature": 1.0,
        "max_completion_tokens": 50,
    }
    assert (request.kind, request.model, request.metadata) == ("messages", "policy", {"user_id": "u"})


def test_responses_as_codex_sends_them_keep_what_a_template_shows():
    call = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command": ["ls"]}'}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "incomplete",
            "content": [{"type": "output_text", "text": "so"}],
        },
        call | {"id": "f", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
    ]
    body = {
        "model": "policy",
        "instructions": "be brief",
        "input": items,
        "tools": [{"type": "function", "name": "shell", "strict": True, "parameters": {"type": "object"}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "s", "turn_id": "t"},
    }
    request = check_responses(body)
    assert request.fields == {
        "instructions": "be brief\n\nsandbox",
        "input": [
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "so"},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": None,
                "strict": True,
                "parameters": {"type": "object"},
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "stream": True,
        "include": [],
    }


def refused_field(check, request):
    """Return the status of the refusal, and the field that it names."""
    with pytest.raises(RefusedError) as refused:
        check(request)
    return refused.value.status, refused.value.body["error"]["param"]


@pytest.mark.parametrize("check", [(check_messages, MESSAGES), (check_responses, RESPONSES)])
def test_a_call_of_an_episode_is_sampled_as_the_run_is(check):
    sampling = Sampling(2, 8, 0.7)
    request = as_in_training(check[0](check[1]), sampling)
    name = "max_completion_tokens" if check[0] is check_messages else "max_output_tokens"
    wanted = {"temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0, "frequency_penalty": 0, name: 8}
    assert wanted.items() <= request.fields.items()
    with pytest.raises(RefusedError) as refused:
        as_in_training(check[0](check[1] | {"temperature": 1.0}), sampling)
    assert refused.value.body["error"]["param"] == "temperature"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"system": [IMAGE]}, "system"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "look"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}}}, "output_config"),
        ({"container": "c"}, "container"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
def test_what_messages_cannot_have_is_refused_by_name(changes, field):
    assert refused_field(check_messages, MESSAGES | changes) == (400, field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "agents", "description": "d", "tools": []}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "a", "server_url": "http://a"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"request_id": "r"}, "request_id"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"vllm_xargs": {}}, "vllm_xargs"),
    ],
)
def test_what_responses_cannot_have_is_refused_by_name(changes, field):
    assert refused_field(check_responses, RESPONSES | changes) == (400, field)


@asynchronous
async def test_errors_have_the_form_of_the_dialect_and_either_header_has_the_key(tmp_path):
    async with endpoint(tmp_path, keys=(KEY,)) as it:
        key = KEY.decode()
        status, _, content = await it.post(MESSAGES, path="/v1/messages", x_api_key="wrong")
        assert (status, json.loads(content)["error"]["type"]) == (401, "authentication_error")
        assert json.loads(content)["type"] == "error"
        status, _, content = await it.post(MESSAGES | {"container": "c"}, path="/v1/messages", x_api_key=key)
        assert (status, json.loads(content)["error"]["type"]) == (400, "invalid_request_error")
        assert "container" in json.loads(content)["error"]["message"]
        named = "/episodes/lease-7.0/v1/messages"
        assert (await it.post(MESSAGES, path=named, x_api_key=key))[0] == 400, "the run has no episodes"
        status, headers, content = await it.post(MESSAGES, path="/v1/messages?beta=true", x_api_key=key)
        assert (status, headers["x-policy-version"], json.loads(content)["model"]) == (200, "12", "policy@v12")
        bearer = {"authorization": f"Bearer {key}"}
        status, _, content = await it.post(RESPONSES | {"store": True}, path="/v1/responses", **bearer)
        assert (status, json.loads(content)["error"]["param"]) == (400, "store")
        assert (await it.post(RESPONSES, path="/v1/responses", **bearer))[0] == 200
        assert it.value("requests_total", outcome="refused") == 4
