"""What a plain `vllm serve` is asked, and what its answers must hold.

Guarantee: `sample` returns what was sampled on exactly the model that it names, token by token with log-probs, or raises. All
parameters of sampling are given, so that no default of the server or of the model's `generation_config.json` is applied.
"""

import math
from typing import Annotated, Any

import msgspec

from producer.calls.limits import group_fields
from producer.engine_server.http_client import HttpClient, ServerLostError, ServerMismatchError, ServerRefusedError
from producer.engine_server.load import samples_of, scheduler_load
from producer.interfaces import Completion
from producer.state import EngineLoad
from protocol.wire.messages import Sampling

TOP = 20  # of the likeliest tokens; vLLM's `--max-logprobs` allows as many unless it is given
_COMPLETIONS = "/v1/completions"
_BYTES_PER_TOKEN = 1024  # of an answer: its text three times, its log-prob twice, its id
_SLOTS = "vllm:lora_requests_info"
_MOST_DIGITS = 9  # of a number of slots
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ModelCard(msgspec.Struct):
    """A model that the server offers. An adapter has a parent, and its path as `root`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _PromptToken(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _PromptToken] | None] | None = None


class _Completions(msgspec.Struct):
    model: str
    choices: list[_Choice]


class VllmApi:
    """Raises ServerLostError, ServerRefusedError or ServerMismatchError, as `HttpClient` does."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self.url = http.url

    async def check_health(self) -> None:
        """Raises ServerLostError where its engine is dead."""
        try:
            await self._http.get_text("/health")
        except ServerRefusedError as error:
            if error.status < 500:
                raise
            raise ServerLostError(f"is not well: {error}") from error

    async def models(self) -> list[ModelCard]:
        return (await self._http.get("/v1/models", _Models)).data

    async def num_lora_slots(self) -> int | None:
        """As its metrics say, once a request has named an adapter; None if they do not."""
        try:
            samples = samples_of(await self._http.get_text("/metrics"), (_SLOTS,))
        except ServerRefusedError:
            return None
        slots = [sample.labels.get("max_lora", "") for sample in samples]
        return next((int(text) for text in slots if text.isdecimal() and len(text) <= _MOST_DIGITS), None)

    async def scheduler_load(self) -> EngineLoad | None:
        """As its metrics say; None if they do not."""
        try:
            return scheduler_load(await self._http.get_text("/metrics"))
        except ServerRefusedError:
            return None

    async def load(self, name: str, path: str) -> None:
        await self._http.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload(self, name: str) -> None:
        await self._http.tell("/v1/unload_lora_adapter", {"lora_name": name})

    async def score(self, model: str, token_ids: list[int]) -> list[float]:
        """The log-probs of each of these tokens but the first, at temperature 1. vLLM uses no cached KV for that."""
        (choice,) = await self._complete(
            model, token_ids, 1, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        )
        pairs = zip(token_ids[1:], (choice.prompt_logprobs or [])[1:], strict=False)
        found = [position[str(token)].logprob for token, position in pairs if position and str(token) in position]
        if len(found) != len(token_ids) - 1:
            raise ServerMismatchError(f"returns {len(found)} log-probs of a prompt of {len(token_ids)} tokens")
        return found

    async def next_token(self, model: str, token_ids: list[int], temperature: float) -> dict[str, float]:
        """What the server gives as log-probs of the `TOP` likeliest next tokens, by token."""
        asked = {"max_tokens": 1, "temperature": temperature, "logprobs": TOP, "return_tokens_as_token_ids": True}
        (choice,) = await self._complete(model, token_ids, 1, _every_parameter() | asked)
        first = (choice.logprobs.top_logprobs or [None])[0] if choice.logprobs else None
        if not first:
            raise ServerMismatchError(f"returns no log-probs of the {TOP} likeliest tokens")
        return dict(sorted(first.items(), key=lambda item: -item[1])[:TOP])  # not what was sampled beside them

    async def sample(self, model: str, prompt_ids: list[int], sampling: Sampling, version: int) -> list[Completion]:
        """A group under the adapter `model`, which is this version. The caller sets the deadline."""
        asked = _every_parameter(**group_fields(sampling))
        choices = await self._complete(model, prompt_ids, sampling.num_generations, asked)
        return [_completion(choice, prompt_ids, sampling, version) for choice in choices]

    async def _complete(self, model: str, prompt_ids: list[int], count: int, asked: dict[str, Any]) -> list[_Choice]:
        body = {"model": model, "prompt": prompt_ids, "return_token_ids": True} | asked
        tokens = len(prompt_ids) * count + asked["max_tokens"] * count * max(1, asked.get("logprobs", 0))
        answer = await self._http.ask(
            _COMPLETIONS,
            body,
            _Completions,
            max_bytes=2**20 + _BYTES_PER_TOKEN * tokens,
            has_limit=asked["max_tokens"] == 1,
        )
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if answer.model != model:
            raise ServerMismatchError(
                f"was asked for {model} and answers for {answer.model}: nothing between may choose another"
            )
        if [choice.index for choice in choices] != list(range(count)):
            raise ServerMismatchError(f"was asked for {count} completions and returns {len(choices)}")
        return choices


def _every_parameter(**given: Any) -> dict[str, Any]:
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return neutral | {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False} | given


def _completion(choice: _Choice, prompt_ids: list[int], sampling: Sampling, version: int) -> Completion:
    token_ids, logprobs = choice.token_ids or [], choice.logprobs.token_logprobs if choice.logprobs else []
    if choice.finish_reason == "abort":
        raise ServerLostError("ended a request before its time")
    if choice.finish_reason not in ("stop", "length"):
        raise ServerMismatchError(f"ended a completion because of {choice.finish_reason!r}")
    if choice.prompt_token_ids != prompt_ids:
        raise ServerMismatchError(
            "generated from another prompt than it was given, or does not say: it needs vLLM 0.26 or newer"
        )
    known = [value for value in logprobs if value is not None and math.isfinite(value)]
    if not 0 < len(token_ids) == len(known) == len(logprobs) <= sampling.max_completion_length:
        raise ServerMismatchError(
            f"returns {len(token_ids)} tokens with {len(known)} log-probs where up to {sampling.max_completion_length} were asked"
        )
    return Completion(token_ids, known, choice.finish_reason == "length", [version] * len(token_ids))
