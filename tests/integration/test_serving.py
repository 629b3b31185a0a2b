"""The endpoint on a real engine, asked by the packages `openai` and `anthropic`."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestState

from producer.policies.registry import AdapterRegistry
from protocol.wire.messages import Sampling
from slipstream_extras.endpoint.agents import Agents
from slipstream_extras.endpoint.dialects import check_messages, check_responses
from slipstream_extras.endpoint.generation import ServedEngine
from slipstream_extras.endpoint.openai import Call, check_request
from slipstream_extras.endpoint.serving import base_url
from tests.integration.engines import LiveEngine, live_engine
from tests.integration.models import CHAT_TEMPLATE, build_model, reference_logprobs
from tests.policies import registry_of
from tests.scripted_trainer import lease
from tests.served import served
from tests.unit.producer.loop import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MESSAGES = [{"role": "user", "content": "What is two and three?"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Iterator[LiveEngine]:
    folder = tmp_path_factory.mktemp("serving")
    serve = {"enabled": True, "version_ttl_s": 120.0, "max_requests": 8}
    with live_engine(build_model("llama", folder / "model"), folder, serve=serve) as engine:
        yield engine


@pytest.fixture(scope="module")
def registry(live: LiveEngine) -> Iterator[AdapterRegistry]:
    made = registry_of(live.engine.weights, live.folder)
    with live.unloading(made):
        yield made


@asynccontextmanager
async def serving_clients(live: LiveEngine, registry: AdapterRegistry, **sampling: Any):
    config = live.config.model_copy(update={"sampling": live.config.sampling.model_copy(update=sampling)})
    answering = live.engine.openai_server(config)
    engine = ServedEngine(answering, registry, live.engine.capabilities.max_num_seqs)
    async with (
        served(live.config, engine) as (listener, serving),
        openai.AsyncOpenAI(base_url=base_url(listener), api_key="none", max_retries=0) as client,
    ):
        yield client, serving


@asynccontextmanager
async def clients(live: LiveEngine, registry: AdapterRegistry, **sampling: Any):
    async with serving_clients(live, registry, **sampling) as (client, _):
        yield client


def test_log_probs_are_those_of_the_trainer_and_the_answer_names_its_version(live, registry):
    async def body():
        await registry.publish(live.downloaded(1))
        async with clients(live, registry) as client:
            answers = []
            for model in ("policy", "policy@v1"):
                raw = await client.chat.completions.with_raw_response.create(
                    model=model, messages=MESSAGES, n=3, max_tokens=12, logprobs=True, temperature=0.7, seed=5,
                    extra_body={"return_token_ids": True},
                )  # fmt: skip
                answers.append((raw.headers["x-policy-version"], raw.parse()))
            return answers

    for version, answer in live.run(body()):
        assert (version, answer.model) == ("1", "policy@v1")
        assert len(answer.choices) == 3
        for choice in answer.choices:
            returned = [token.logprob for token in choice.logprobs.content]
            expected = reference_logprobs(
                live.model, live.peft_folder(1), answer.prompt_token_ids, choice.token_ids, temperature=0.7
            )
            torch.testing.assert_close(torch.tensor(returned), expected, atol=1e-3, rtol=0)


def test_a_named_version_answers_the_same_while_a_newer_one_is_current_and_is_let_go_in_time(live, registry):
    async def greedy(client, model: str, stream: bool) -> tuple[str, str]:
        asked = {"model": model, "messages": MESSAGES, "max_tokens": 16, "temperature": 0.0}
        if not stream:
            answer = await client.chat.completions.create(**asked)
            return answer.model, answer.choices[0].message.content
        pieces = [piece async for piece in await client.chat.completions.create(**asked, stream=True)]
        return pieces[0].model, "".join(piece.choices[0].delta.content or "" for piece in pieces)

    async def body():
        await registry.publish(live.downloaded(1))
        async with serving_clients(live, registry) as (client, serving):
            former = registry.current
            first = await greedy(client, "policy", stream=False)
            await registry.publish(live.downloaded(2))
            second = await greedy(client, "policy", stream=True)
            assert (first[0], second[0]) == ("policy@v1", "policy@v2")
            assert first[1] != second[1]
            for stream in (True, False) * 4:
                assert await greedy(client, "policy@v1", stream) == first
                assert await greedy(client, "policy", stream) == second
            assert [card.id async for card in client.models.list()] == ["policy", "policy@v2", "policy@v1"]
            assert former in registry._versions
            assert serving.versions.ttl_s == live.config.serve.version_ttl_s
            serving.versions.ttl_s = 0.5
            async with asyncio.timeout(60):
                while former in registry._versions:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            with pytest.raises(
                openai.NotFoundError, match=r"there is no model 'policy@v1'; there is: policy, policy@v2"
            ):
                await greedy(client, "policy@v1", False)

    live.run(body())


def test_a_completion_that_vllm_could_not_finish_has_not_ended_for_its_recorder(live, registry, monkeypatch):
    """Else an agent's rollout would hold what the agent never got, as if it were whole."""

    def failed(self, *arguments):
        made = make(self, *arguments)
        if made.finish_reason is not None:
            made.finish_reason = "error"
        return made

    make = RequestState._new_completion_output
    monkeypatch.setattr(RequestState, "_new_completion_output", failed)

    async def body():
        await registry.publish(live.downloaded(1))
        server = live.engine.openai_server(live.config)
        request = check_request("completion", {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4, "stream": True})
        with registry.pin() as adapter:
            call = Call(adapter)
            events = [event async for event in await server.answer(request, call)]
            await call.close()
        return events, call.sampled

    events, [sampled] = live.run(body())
    assert any('"error"' in event for event in events)
    assert len(sampled.token_ids) == len(sampled.logprobs) > 0
    assert sampled.finish_reason is None


def test_a_request_ends_where_the_run_s_completions_do(live, registry):
    ends = list(range(20, 60))

    async def body():
        await registry.publish(live.downloaded(1))
        tokens = {"extra_body": {"return_token_ids": True}}
        async with clients(live, registry, stop_token_ids=ends, ignore_eos=True) as client:
            asked = {"model": "policy", "prompt": [5, 6, 7], "n": 4, "max_tokens": 24, "seed": 1}
            return await client.completions.create(**asked, **tokens)

    choices = live.run(body()).choices
    assert all(not set(ends) & set(choice.token_ids[:-1]) for choice in choices)
    assert [choice.finish_reason == "stop" for choice in choices] == [
        choice.token_ids[-1] in ends for choice in choices
    ]
    assert any(choice.finish_reason == "stop" for choice in choices)


def test_completions_take_text_and_tokens_and_say_what_they_sampled(live, registry):
    async def body():
        await registry.publish(live.downloaded(3))
        async with clients(live, registry) as client:
            return await client.completions.create(
                model="policy",
                prompt=[[5, 6, 7], [8, 9]],
                n=2,
                max_tokens=6,
                logprobs=0,
                extra_body={"return_token_ids": True},
            )

    answer = live.run(body())
    assert (answer.model, len(answer.choices)) == ("policy@v3", 4)
    for number, choice in enumerate(answer.choices):
        prompt_ids = [[5, 6, 7], [8, 9]][number // 2]
        assert choice.prompt_token_ids == prompt_ids
        expected = reference_logprobs(live.model, live.peft_folder(3), prompt_ids, choice.token_ids, temperature=1.0)
        torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), expected, atol=1e-3, rtol=0)


HOSTILE = [
    {"messages": MESSAGES, "temperature": -1.0},
    {"messages": MESSAGES, "top_p": 0.0},
    {"messages": MESSAGES, "n": 10**9},
    {"messages": MESSAGES, "max_tokens": -1},
    {"messages": MESSAGES, "max_tokens": 10**9},
    {"messages": MESSAGES, "top_logprobs": 10**6, "logprobs": True},
    {"messages": MESSAGES, "seed": 2**70},
    {"messages": MESSAGES, "stop": ["a"] * 1000},
    {"messages": MESSAGES, "chat_template": "{{ 1 }}"},
    {"messages": MESSAGES, "structured_outputs": {"regex": "("}},
    {"messages": MESSAGES, "kv_transfer_params": {"do_remote_prefill": True}},
    {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"messages": [{"role": "user", "content": "a" * 4000}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
    {"messages": [{"role": None, "content": "a"}]},
    {"prompt": [10**6]},
    {"prompt": [-1]},
    {"prompt": []},
    {"prompt": {"a": 1}},
    {"prompt": [5] * 300},
    {"prompt": [2**70]},
    {"prompt": [True, 5.5]},
    {"prompt": ["a", 5]},
    {"prompt": [[5], "a"]},
    {"prompt": [[[5]]]},
    {"prompt": [[5]] * 200},
    {"prompt": "a", "logprobs": 2**40},
    {"prompt": "a", "stream_options": {"include_usage": True}},
    {"prompt": "a", "max_tokens": 2**70},
    {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{% for i in range(10**12) %}{% endfor %}"}},
    {"messages": MESSAGES, "top_k": -5},
    {"messages": MESSAGES, "min_p": 1.5},
    {"messages": MESSAGES, "presence_penalty": 1e9},
    {"messages": MESSAGES, "parallel_tool_calls": {"a": 1}},
    {"messages": MESSAGES, "return_token_ids": []},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"x": 1}]}]},
]
TOLERATED = [
    {"messages": MESSAGES, "temperature": 1e308},
    {"messages": MESSAGES, "temperature": 1e-320},
    {"messages": MESSAGES, "top_p": 1e-320},
    {"messages": MESSAGES, "top_k": 2**31},
    {"messages": MESSAGES, "top_k": 2**62},
    {"messages": MESSAGES, "seed": -(2**63)},
    {"messages": MESSAGES, "seed": 2**63 - 1, "n": 4},
    {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": False, "add_generation_prompt": "x", "messages": 7}},
    {"messages": MESSAGES, "chat_template_kwargs": {"tools": 7, "documents": "x", "conversation": None}},
    {"messages": MESSAGES, "stop": ["\u0000", "\uffff"], "max_tokens": 4},
    {"messages": [{"role": "r" * 200, "content": "\u0000"}], "max_tokens": 4},
    {"messages": [{"role": "tool", "content": ""}], "max_tokens": 4},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}], "name": {"a": 1}}], "max_tokens": 4},
    {"messages": MESSAGES, "user": 5, "stream": "yes"},
    {"prompt": ""},
    {"prompt": [[]]},
    {"prompt": [0], "max_tokens": 0},
]
"""What vLLM, or the model's chat template, may or may not refuse."""


def test_no_request_harms_the_engine_and_a_client_that_leaves_frees_it(live, registry):
    async def body():
        await registry.publish(live.downloaded(4))
        async with clients(live, registry) as client:
            for values in HOSTILE:
                path = "/completions" if "prompt" in values else "/chat/completions"
                with pytest.raises(openai.APIStatusError) as refused:
                    await client.post(path, body={"model": "policy"} | values, cast_to=object)
                assert 400 <= refused.value.status_code < 500, (values, refused.value)
            for values in TOLERATED:
                path = "/completions" if "prompt" in values else "/chat/completions"
                status = 200
                try:
                    async with asyncio.timeout(60):
                        await client.post(path, body={"model": "policy", "max_tokens": 8} | values, cast_to=object)
                except openai.APIStatusError as error:
                    status = error.status_code
                assert status < 500, values
                live.engine.check_alive()
            asked = {"model": "policy", "messages": MESSAGES, "n": 8, "max_tokens": 200}
            leaving = asyncio.create_task(client.chat.completions.create(**asked))
            while live.engine.current_load().running == 0:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.01)
            leaving.cancel()
            async with asyncio.timeout(60):
                answer = await client.chat.completions.create(**asked | {"n": 8, "max_tokens": 4})
                assert len(answer.choices) == 8
                while live.engine.current_load().running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            live.engine.check_alive()

    live.run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_several_prompts_that_leaves_leaves_nothing_in_the_engine(live, registry, stream):
    processor = live.engine._core.llm.output_processor

    async def body():
        await registry.publish(live.downloaded(5))
        async with clients(live, registry) as client:
            prompts, before = [[5, 6, 7], [8, 9], [10]], registry._versions[registry.current].pins

            async def ask() -> None:
                asked = {"model": "policy", "prompt": prompts, "n": 2, "max_tokens": 200}
                answer = await client.completions.create(**asked, stream=stream)
                if stream:
                    async for _ in answer:
                        await asyncio.sleep(0.05)  # it reads slowly

            for delay_s in (0.0, 0.02, 0.1, 0.3):
                asking = asyncio.create_task(ask())
                await until(lambda asking=asking: processor.request_states or asking.done())
                await asyncio.sleep(delay_s)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await until(lambda: not processor.request_states)
                assert (processor.parent_requests, processor.external_req_ids) == ({}, {})
            await until(lambda: registry._versions[registry.current].pins <= before + 1)  # what clients keep, once
            assert len((await client.completions.create(model="policy", prompt=prompts, max_tokens=2)).choices) == 3

    live.run(body())


TOOL_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}<tool_call>"
    "{{ {'name': c['function']['name'], 'arguments': c['function']['arguments']} | tojson }}</tool_call>{% endfor %}",
)
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}}
CALLED = 'I see.<tool_call>{"name": "look", "arguments": {"at": "door"}}</tool_call>'
Play = Callable[[str, bool], Awaitable[list[Any]]]


async def of_anthropic(root: str, stream: bool) -> list[Any]:
    async with anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 900, "system": "be brief"}
        asked["tools"] = [
            {"name": "look", "input_schema": LOOK, "cache_control": {"type": "ephemeral"}, "strict": True}
        ]
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is there?"}]}]
        answers = []
        for _ in range(2):
            if stream:
                async with client.messages.stream(messages=messages, **asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **asked)
            answers.append(answer)
            if answer.stop_reason != "tool_use":
                continue
            result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "a room"}
            said = [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in answer.content]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        return [(block.type, block.model_dump()) for answer in answers for block in answer.content] + [answers[-1]]


async def of_openai(root: str, stream: bool) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "policy", "store": False, "parallel_tool_calls": False}
        asked["tools"] = [{"type": "function", "name": "look", "parameters": LOOK, "strict": True}]
        messages: list[Any] = [
            {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "What is there?"}]},
        ]
        answers = []
        for _ in range(2):
            answer = await client.responses.create(input=messages, stream=stream, **asked)
            if stream:
                events = [event async for event in answer]
                assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
                answer = events[-1].response
            answers.append(answer)
            calls = [item for item in answer.output if item.type == "function_call"]
            messages += [item.model_dump(exclude_none=True) for item in answer.output]
            messages += [{"type": "function_call_output", "call_id": it.call_id, "output": "a room"} for it in calls]
        return [(item.type, item.model_dump()) for answer in answers for item in answer.output] + [answers[-1]]


async def played(
    live: LiveEngine, registry: AdapterRegistry, play: Play, stream: bool, longest: int = 100
) -> tuple[list[Any], Any]:
    """Play an episode at an endpoint that finds calls of tools: what the agent got, and the episode."""
    settings = live.config.serve.model_copy(update={"tool_call_parser": "hermes"})
    server = live.engine.openai_server(live.config.model_copy(update={"serve": settings}))
    engine = ServedEngine(server, registry, live.engine.capabilities.max_num_seqs)
    agents = Agents(("solved",))
    async with served(live.config, engine, agents=agents) as (listener, _):
        fulfilling = asyncio.create_task(agents.fulfil(lease(7, sampling=Sampling(1, longest, 1.0))))
        (name,) = (await agents.take(5.0) or {})["episodes"]
        got = await play(f"{base_url(listener).removesuffix('/v1')}/episodes/{name}", stream)
        agents.reward(name, {"solved": 1.0})
        ((episode,), _, _) = await fulfilling
    return got, episode


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("play", [of_anthropic, of_openai])
def test_an_episode_in_another_dialect_is_one_record_with_calls_of_tools(live, registry, monkeypatch, play, stream):
    llm, tokenizer = live.engine._core.llm, AutoTokenizer.from_pretrained(live.model)
    monkeypatch.setattr(llm.renderer.tokenizer, "chat_template", TOOL_TEMPLATE)
    texts, constraints = iter([CALLED, "A room."]), []

    async def generate(prompt: Any, params: Any, name: str, *, lora_request: Any, **_: Any) -> AsyncIterator[Any]:
        constraints.append(params.structured_outputs)
        ids = tokenizer(next(texts) + "<|end|>")["input_ids"]
        pieces = [[token] for token in ids] if params.output_kind is RequestOutputKind.DELTA else [ids]
        for number, piece in enumerate(pieces, 1):
            logprobs: Any = [{token: Logprob(-0.5)} for token in piece]
            text, end = tokenizer.decode(piece, skip_special_tokens=True), number == len(pieces)
            output = CompletionOutput(0, text, piece, None, logprobs, finish_reason="stop" if end else None)
            seen = prompt["prompt_token_ids"]
            yield RequestOutput(name, None, seen, None, [output], end, lora_request=lora_request)

    async def body():
        await registry.publish(live.downloaded(1))
        with monkeypatch.context() as patch:
            patch.setattr(llm, "generate", generate)
            return await played(live, registry, play, stream)

    got, episode = live.run(body())
    *blocks, last = got
    kinds = {of_anthropic: ["text", "tool_use", "text"], of_openai: ["message", "function_call", "message"]}
    assert [kind for kind, _ in blocks] == kinds[play]
    call = blocks[1][1]
    assert call["name"] == "look"
    assert (call["input"] if play is of_anthropic else json.loads(call["arguments"])) == {"at": "door"}
    assert last.model == "policy@v1"
    (record,) = episode.records
    ours = record.versions >= 0
    said = [token for token, sampled in zip(record.token_ids, ours, strict=True) if sampled]
    assert tokenizer.decode(said) == f"{CALLED}<|end|>A room.<|end|>"
    assert tokenizer.decode(record.token_ids) == (
        f"<|system|>be brief<|end|><|user|>What is there?<|end|><|assistant|>{CALLED}<|end|>"
        "<|tool|>a room<|end|><|assistant|>A room.<|end|>"
    )
    assert set(record.logprobs[ours].tolist()) == {-0.5}
    assert last.usage.input_tokens + last.usage.output_tokens == len(record.token_ids)
    assert constraints == [None, None], "the tools are strict"


@pytest.mark.parametrize("play", [of_anthropic, of_openai])
def test_another_dialect_samples_from_the_policy_and_ends_in_time(live, registry, play):
    async def body():
        await registry.publish(live.downloaded(1))
        _, episode = await played(live, registry, play, stream=True, longest=6)
        checks: Any = {
            of_anthropic: lambda: check_messages({"model": "policy", "messages": MESSAGES, "max_tokens": 200}),
            of_openai: lambda: check_responses({"model": "policy", "input": MESSAGES}),
        }

        async def too_late(call: Call) -> None:
            """Ask, and be out of time as soon as the request is in the engine."""
            processor = live.engine._core.llm.output_processor
            async with asyncio.timeout(60) as scope:
                arrival = asyncio.create_task(until(lambda: processor.request_states))
                arrival.add_done_callback(lambda _: scope.reschedule(asyncio.get_running_loop().time()))
                await live.engine.openai_server(live.config).answer(checks[play](), call)

        with registry.pin() as adapter:
            call = Call(adapter)
            with pytest.raises(TimeoutError):
                await too_late(call)
            await call.close()
        return episode

    episode = live.run(body())
    assert sum(np.count_nonzero(record.versions == 1) for record in episode.records) > 2
    for record in episode.records:
        ours = record.versions == 1
        expected = reference_logprobs(live.model, live.peft_folder(1), record.token_ids[:1], record.token_ids[1:], 1.0)
        torch.testing.assert_close(torch.tensor(record.logprobs[ours]), expected[ours[1:]], atol=1e-3, rtol=0)
