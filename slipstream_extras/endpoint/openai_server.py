"""vLLM's own serving classes, of OpenAI's and Anthropic's APIs, over the engine that training uses.

Guarantee: answers are built by vLLM (chat templates, stops, log-probs, tool calls, streams), and every sampled token is noted. A
request runs on the adapter of its call and on no other. Only the run constrains tokens, also where a client's tool is strict. The
constructors used here agree in releases 0.32 and 0.33.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, cast

from pydantic import ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.lora.request import LoRARequest
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from producer.engine.core import EngineCore
from producer.engine.sampling import limits
from producer.engine.weights import InFlightRequest, VllmWeights
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from slipstream_extras.endpoint.openai import LENGTHS, Answer, Call, RefusedError, ServedRequest, malformed
from slipstream_extras.endpoint.versions import model_name

_CALL: ContextVar[Call] = ContextVar("call")


class OpenAIServer:
    """vLLM's answers to requests, whose defaults (temperature, length, ...) are those of `sampling:`. Raises ConfigError if vLLM
    does not know `serve.tool_call_parser`."""

    def __init__(self, core: EngineCore, weights: VllmWeights, config: RunConfig) -> None:
        self._limits = limits(config.sampling.message)
        llm, client = core.llm, cast(Any, _Client(core, weights, self._limits.get("structured_outputs")))
        models = _Models(client, config.model.path, weights)
        parser = config.serve.tool_call_parser
        shared: dict[str, Any] = {
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
            "enable_auto_tools": parser is not None,
            "tool_parser": parser,
            "default_chat_template_kwargs": config.dataset.chat_template_kwargs,
        }
        try:
            renderer = OnlineRenderer(llm.model_config, llm.renderer, **shared)
            self._chat = AnthropicServingMessages(client, models, "assistant", online_renderer=renderer, **shared)
            self._responses = OpenAIServingResponses(client, models, renderer, **shared)
        except Exception as error:
            raise ConfigError(f"serve.tool_call_parser: vLLM refuses {parser}: {error}") from error
        self._completion = OpenAIServingCompletion(client, models, online_renderer=renderer, request_logger=None)
        defaults = config.sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        for serving in (self._chat, self._responses, self._completion):
            serving.default_sampling_params = defaults
        self._max_tokens = config.sampling.max_completion_length

    async def answer(self, request: ServedRequest, call: Call) -> Answer:
        """Generate; `call` notes the samples. A stream begins to generate when it is read. Raises RefusedError if vLLM
        refuses."""
        _CALL.set(call)
        values = {LENGTHS[request.kind]: self._max_tokens} | self._limits | request.fields
        values |= {"model": model_name(call.adapter.version), "request_id": call.id}
        answer: Any
        try:
            answer = await getattr(self, f"_{request.kind}_answer")(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise malformed(f"{place}: {first['msg']}", place or None) from None
        except Exception as error:  # vLLM raises many kinds, and knows which are the client's fault
            answer = self._chat.create_error_response(error)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # vLLM makes an error of it
        if hasattr(answer, "error"):
            info = answer.error
            raise RefusedError(info.code, "malformed", f"vLLM refused: {info.message}", info.param)
        return answer if isinstance(answer, AsyncGenerator) else answer.model_dump(mode="json")

    async def _chat_answer(self, values: dict[str, Any]) -> Any:
        return await self._chat.create_chat_completion(ChatCompletionRequest.model_validate(values))

    async def _completion_answer(self, values: dict[str, Any]) -> Any:
        return await self._completion.create_completion(CompletionRequest.model_validate(values))

    async def _messages_answer(self, values: dict[str, Any]) -> Any:
        names = {"messages", "system", "tools", "tool_choice"} & values.keys()
        said: dict[str, Any] = {name: values.pop(name) for name in names}
        said |= {"model": values["model"], "max_tokens": 1, "stream": values.get("stream")}
        chat = self._chat.to_chat_completion_request(
            AnthropicMessagesRequest.model_validate(said), merge_inline_system=self._chat._merge_inline_system
        )
        sampled = ChatCompletionRequest.model_validate(values | {"messages": []})
        for name in ("messages", "tools", "tool_choice", "parallel_tool_calls", "stream_options"):
            setattr(sampled, name, getattr(chat, name))
        answer = await self._chat.create_chat_completion(sampled)
        if hasattr(answer, "error"):
            return answer
        if isinstance(answer, AsyncGenerator):
            return self._chat.message_stream_converter(answer)
        for tool_call in answer.choices[0].message.tool_calls:
            tool_call.function.arguments = _as_object(tool_call.function.arguments)
        return self._chat.messages_full_converter(answer)

    async def _responses_answer(self, values: dict[str, Any]) -> Any:
        answer = await self._responses.create_responses(ResponsesRequest.model_validate(values | {"store": False}))
        return _sent(answer, _CALL.get()) if isinstance(answer, AsyncGenerator) else answer


def _as_object(arguments: str) -> str:
    """Return the arguments of a call as Anthropic's clients can read them: others than an object are a text in one, by the name
    that Anthropic gives it."""
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    return arguments if is_object else json.dumps({"INVALID_JSON": arguments})


async def _sent(events: AsyncGenerator[Any, None], call: Call) -> AsyncGenerator[str, None]:
    """Yield events as they are sent, the first ones with the first tokens, so that the version that sampled them is known."""
    held = ""
    async with aclosing(events):
        async for event in events:
            held += f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"
            if call.sampled:
                yield held
                held = ""


class _Models(OpenAIServingModels):
    """The one model of the call that is being answered."""

    def __init__(self, client: Any, path: str, weights: VllmWeights) -> None:
        self._weights = weights
        super().__init__(engine_client=client, base_model_paths=[BaseModelPath("policy", path)])

    @property
    def lora_requests(self) -> dict[str, LoRARequest]:
        if not self._weights.holds_versions:
            return {}
        adapter = _CALL.get().adapter
        return {model_name(adapter.version): self._weights.lora_request(adapter)}

    @lora_requests.setter
    def lora_requests(self, _: dict[str, LoRARequest]) -> None:
        """Ignore the empty dict that vLLM sets."""

    def is_base_model(self, model_name: str) -> bool:
        return not self._weights.holds_versions

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        return model_name(_CALL.get().adapter.version)


class _Client:
    """The engine for vLLM's serving classes: `generate` is ours, all else the engine's. `guides` are the run's structured
    outputs."""

    def __init__(self, core: EngineCore, weights: VllmWeights, guides: dict[str, Any] | None) -> None:
        self._core, self._llm = core, core.llm
        self._weights, self._guides = weights, guides

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        if params.logprobs is None:  # a call notes them always
            params.logprobs, params.flat_logprobs = 0, True
        params.structured_outputs = StructuredOutputsParams(**self._guides) if self._guides else None
        call = _CALL.get()
        if self._weights.holds_versions:
            return call.add(request_id, self._streamed(call, prompt, params, request_id, lora_request, options))
        return call.add(request_id, self._whole(call, prompt, params, request_id, options))

    async def _streamed(
        self, call: Call, prompt: Any, params: Any, request_id: str, lora_request: Any, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        call.note_reader(request_id)
        generating = self._llm.generate(prompt, params, request_id, lora_request=lora_request, **options)
        async with aclosing(generating) as outputs:
            async for output in outputs:
                self._core.check_lora(output, lora_request)
                _note(call, request_id, output, InFlightRequest(call.adapter.version))
                yield output
                call.note_reader(request_id)

    async def _whole(
        self, call: Call, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Yield the whole output at its end, because requests in flight may begin anew until weights are verified."""
        call.note_reader(request_id)
        params.output_kind = RequestOutputKind.FINAL_ONLY

        async def final(group: str, lora: Any, salt: str) -> Any:
            generating = self._llm.generate({**prompt, "cache_salt": salt}, params, group, lora_request=lora, **options)
            async with aclosing(generating) as outputs:
                return [output async for output in outputs][-1]

        output, request = await self._weights.sample(final, call.adapter)
        _note(call, request_id, output, request)
        yield output


def _note(call: Call, request_id: str, output: Any, request: InFlightRequest) -> None:
    """Add the tokens of each completion in an output, or in a piece of it."""
    for sample in output.outputs:
        sampled = call.of(request_id, sample.index, output.prompt_token_ids or [])
        logprobs = sample.logprobs
        if hasattr(logprobs, "start_indices"):
            sampled.logprobs += [logprobs.logprobs[start] for start in logprobs.start_indices]
        else:
            pairs = zip(logprobs or (), sample.token_ids, strict=True)
            sampled.logprobs += [position[token].logprob for position, token in pairs]
        sampled.token_ids += sample.token_ids
        sampled.token_versions += request.token_versions(sample.index, len(sample.token_ids))
        if sample.finish_reason not in ("abort", "error"):
            sampled.finish_reason = sample.finish_reason
