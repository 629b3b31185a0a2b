"""Requests to one vLLM server.

Guarantee: `sample` returns tokens that were sampled on exactly the model that it names, with log-probs, or raises. All parameters
of sampling are sent, so that no default of the server or of the model applies.
"""

import asyncio
import math
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from producer.engine.sampling import group_fields
from producer.engine_contract import UNTOLD, Completion, EngineLoad, EngineSteps, Scored
from protocol.http_client import HttpClient, ServerLostError, ServerMismatchError, ServerRefusedError
from protocol.wire.messages import Sampling

Numbers = NDArray[Any]


TOP = 8  # likeliest tokens: vocabularies of models in tests have hardly more
_COMPLETIONS = "/v1/completions"
_BYTES_PER_TOKEN = 1024  # in an answer: its text three times, its log-prob twice, its id
_SLOTS = "vllm:lora_requests_info"
_MOST_DIGITS = 9  # of a number of slots
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ModelCard(msgspec.Struct):
    """A model that the server offers. An adapter has a parent, and `root` is its path."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Tokens(msgspec.Struct):
    tokens: list[_TokenId]


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


class _PromptDetails(msgspec.Struct):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Completions(msgspec.Struct):
    model: str
    choices: list[_Choice]
    usage: _Usage | None = None

    @property
    def cached(self) -> int:
        """Return how many tokens of the prompt were in the prefix cache; 0 from a server that does not tell
        (`--enable-prompt-tokens-details`)."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens or 0 if details else 0


class VllmApi:
    """The routes of `vllm serve`. Each call raises ServerLostError, ServerRefusedError or ServerMismatchError."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self.url = http.url

    async def check_health(self) -> None:
        """Raise ServerLostError if the engine of the server is dead."""
        try:
            await self._http.get_text("/health")
        except ServerRefusedError as error:
            if error.status < 500:
                raise
            raise ServerLostError(f"fails its health check: {error}") from error

    async def models(self) -> list[ModelCard]:
        return (await self._http.get("/v1/models", _Models)).data

    async def num_lora_slots(self) -> int | None:
        """Return the number in its metrics, which they have once a request has named an adapter; else None."""
        try:
            samples = samples_of(await self._http.get_text("/metrics"), (_SLOTS,))
        except ServerRefusedError:
            return None
        slots = [sample.labels.get("max_lora", "") for sample in samples]
        return next((int(text) for text in slots if text.isdecimal() and len(text) <= _MOST_DIGITS), None)

    async def scheduler_load(self) -> EngineLoad | None:
        """Return the load in its metrics; None if they have none."""
        try:
            return scheduler_load(await self._http.get_text("/metrics"))
        except ServerRefusedError:
            return None

    async def load(self, name: str, path: str) -> None:
        await self._http.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload(self, name: str) -> None:
        await self._http.tell("/v1/unload_lora_adapter", {"lora_name": name})

    async def score(self, model: str, token_ids: list[int]) -> list[float]:
        """Return the log-probs of all these tokens but the first, at temperature 1. vLLM uses no cached KV for that."""
        return list((await self.score_with_top(model, token_ids, 0))[0].tolist())

    async def score_with_top(self, model: str, token_ids: list[int], top_k: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return, as `score`, log-probs (N,), and the `top_k` likeliest tokens in each place, (N, k), with theirs, (N, k)."""
        asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
        (choice,) = (await self._complete(model, [token_ids], 1, asked)).choices
        return await asyncio.to_thread(_scores, token_ids, choice.prompt_logprobs or [], top_k)

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Return the tokens of a text, without those that begin or end a prompt."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return (await self._http.ask("/tokenize", body, _Tokens)).tokens

    async def verify(self, model: str, rows: list[list[int]], *, is_base: bool) -> list[Scored]:
        """Score rows at once, without cached KV. Unless it is for the base, ask for the next token of the first row before, as a
        rollout does: some three steps of the engine."""
        asked = _next_token(1.0)
        first = None if is_base else await self._complete(model, rows[:1], 1, asked)
        choices = (await self._complete(model, rows, 1, asked | {"prompt_logprobs": 0})).choices
        scored = [
            Scored(list(_scores(row, choice.prompt_logprobs or [], 0)[0].tolist()))
            for row, choice in zip(rows, choices, strict=True)
        ]
        if first is not None:
            cached, anew = _likeliest(first.choices[0]), _likeliest(choices[0])
            rescored = [anew.get(token, min(anew.values())) for token in cached]
            scored[0] = Scored(scored[0].logprobs, list(cached.values()), rescored, first.cached)
        return scored

    async def next_token(self, model: str, token_ids: list[int], temperature: float) -> dict[str, float]:
        """Return the log-probs of the `TOP` likeliest next tokens, by token."""
        return _likeliest((await self._complete(model, [token_ids], 1, _next_token(temperature))).choices[0])

    async def sample(self, model: str, prompt_ids: list[int], sampling: Sampling, version: int) -> list[Completion]:
        """Sample a group on the adapter `model`, which is this version. The caller sets the deadline."""
        asked = _every_parameter(**group_fields(sampling))
        answer = await self._complete(model, [prompt_ids], sampling.num_generations, asked)
        return [_completion(choice, prompt_ids, sampling, version) for choice in answer.choices]

    async def _complete(
        self, model: str, prompts: list[list[int]], per_prompt: int, asked: dict[str, Any]
    ) -> _Completions:
        prompt, count = prompts[0] if len(prompts) == 1 else prompts, per_prompt * len(prompts)
        body = {"model": model, "prompt": prompt, "return_token_ids": True} | asked
        tokens = sum(map(len, prompts)) * per_prompt * (1 + asked.get("prompt_logprobs", 0))
        tokens += asked["max_tokens"] * count * max(1, asked.get("logprobs", 0))
        answer = await self._http.ask(
            _COMPLETIONS,
            body,
            _Completions,
            max_bytes=2**20 + _BYTES_PER_TOKEN * tokens,
            has_limit=asked["max_tokens"] == 1,
        )
        answer.choices.sort(key=lambda choice: choice.index)
        if answer.model != model:
            raise ServerMismatchError(
                f"was asked for {model} and answers for {answer.model}: remove the proxy that chooses another model"
            )
        if [choice.index for choice in answer.choices] != list(range(count)):
            raise ServerMismatchError(f"was asked for {count} completions and returns {len(answer.choices)}")
        return answer


def _scores(
    token_ids: list[int], positions: list[dict[str, _PromptToken] | None], top_k: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Return log-probs, and likeliest tokens with theirs: vLLM adds the token of the prompt where it is none of these."""
    logprobs, ids, top = list[float](), list[int](), list[float]()
    for token, position in zip(map(str, token_ids[1:]), positions[1:], strict=False):
        if not position or token not in position:
            break
        others = [one for one in position if top_k and (one != token or len(position) == top_k)]
        if len(others) != top_k or not all(other.isdecimal() and len(other) <= _MOST_DIGITS for other in others):
            break
        logprobs.append(position[token].logprob)
        ids += map(int, others)
        top += [position[other].logprob for other in others]
    if len(logprobs) != len(token_ids) - 1:
        raise ServerMismatchError(
            f"returns {len(logprobs)} log-probs of a prompt of {len(token_ids)} tokens, with {top_k} others in each place"
        )
    shape = (len(logprobs), top_k)
    top_ids, top_logprobs = np.array(ids, np.int64).reshape(shape), np.array(top, np.float64).reshape(shape)
    likeliest = np.argsort(-top_logprobs, kind="stable")
    first, second = (np.take_along_axis(values, likeliest, 1) for values in (top_ids, top_logprobs))
    return np.array(logprobs, np.float64), first, second


def _every_parameter(**given: Any) -> dict[str, Any]:
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return neutral | {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False} | given


def _next_token(temperature: float) -> dict[str, Any]:
    asked = {"max_tokens": 1, "temperature": temperature, "logprobs": TOP, "return_tokens_as_token_ids": True}
    return _every_parameter() | asked


def _likeliest(choice: _Choice) -> dict[str, float]:
    first = (choice.logprobs.top_logprobs or [None])[0] if choice.logprobs else None
    if not first:
        raise ServerMismatchError(f"returns no log-probs of the {TOP} likeliest tokens")
    return dict(sorted(first.items(), key=lambda item: -item[1])[:TOP])  # without the sampled token beside them


def _completion(choice: _Choice, prompt_ids: list[int], sampling: Sampling, version: int) -> Completion:
    token_ids, logprobs = choice.token_ids or [], choice.logprobs.token_logprobs if choice.logprobs else []
    if choice.finish_reason == "abort":
        raise ServerLostError("ended a request before its time")
    if choice.finish_reason not in ("stop", "length"):
        raise ServerMismatchError(f"ended a completion because of {choice.finish_reason!r}")
    if choice.prompt_token_ids != prompt_ids:
        raise ServerMismatchError(
            "generated from another prompt than it was given, or does not return its prompt: start it with a release of vLLM "
            "that Slipstream supports (docs/engine-server.md)"
        )
    known = [value for value in logprobs if value is not None and math.isfinite(value)]
    if not 0 < len(token_ids) == len(known) == len(logprobs) <= sampling.max_completion_length:
        raise ServerMismatchError(
            f"returns {len(token_ids)} tokens with {len(known)} log-probs where up to {sampling.max_completion_length} were asked"
        )
    return Completion(token_ids, known, choice.finish_reason == "length", [version] * len(token_ids))


_CACHE, _RUNNING, _WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
_PREEMPTIONS = "vllm:num_preemptions_total"
_NEEDED = (_CACHE, _RUNNING, _WAITING, _PREEMPTIONS)
_STEPS, _TOKENS = "vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum"
_MOST = 2.0**53


def samples_of(metrics: str, names: tuple[str, ...]) -> list[Sample]:
    """Return the samples in the text of `/metrics` whose names begin so; none if the text is malformed."""
    lines = [line for line in metrics.splitlines() if line.startswith(names)]
    try:
        families = list(text_string_to_metric_families("\n".join(lines)))
    except Exception:  # the parser raises many kinds at malformed text
        return []
    return [sample for family in families for sample in family.samples]


def scheduler_load(metrics: str) -> EngineLoad | None:
    """Read the load from the text of `/metrics`, which has a line for each engine of the server; None if lines are missing."""
    found: dict[str, list[float]] = {name: [] for name in (*_NEEDED, _STEPS, _TOKENS)}
    for sample in samples_of(metrics, tuple(found)):
        found.get(sample.name, []).append(sample.value)
    told = {name for name, values in found.items() if values and all(0 <= value < _MOST for value in values)}
    if not told.issuperset(_NEEDED):
        return None
    total = {name: round(sum(found[name])) for name in told}
    steps = EngineSteps(total[_STEPS], total[_TOKENS]) if told.issuperset((_STEPS, _TOKENS)) else UNTOLD
    return EngineLoad(max(found[_CACHE]), total[_RUNNING], total[_WAITING], total[_PREEMPTIONS], steps)
