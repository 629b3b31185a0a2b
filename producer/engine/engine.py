"""The vLLM engine of a producer, in its own process.

Guarantee: `generate` returns tokens that were sampled on exactly the policy it names. Their log-probs are those of the
distribution that they were sampled from. A dead engine raises `EngineError`. Every other refusal of vLLM fails one lease, or
refuses one adapter.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from producer.engine.configuration import build_vllm_config, keep_float32, leave_a_core, model_folder, take_places
from producer.engine.core import SCORING, EngineCore, logprobs_of, lora_request, prompt_of
from producer.engine.sampling import group_fields, limits
from producer.engine.tool_calls import ToolCallParser
from producer.engine.weights import AdapterWeights, InFlightRequest, MergedWeights, VllmWeights
from producer.engine_contract import Adapter, Completion, EngineCapabilities, EngineLoad, EngineSteps
from producer.groups import LeaseFailure
from protocol.config.functions import load_plugin
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, EngineError
from protocol.wire.messages import EngineFacts, Sampling
from protocol.wire.model_folder import base_model_digest, placeholders_of, tokenizer_digest, vocabulary_size


class VllmEngine:
    """A `producer.engine_contract.Engine`. Only the constructor blocks. It raises ConfigError if vLLM refuses `engine:`, and
    EngineError if the engine does not start."""

    def __init__(self, config: RunConfig, num_gpus: int) -> None:
        folder = model_folder(config)
        vllm_config = build_vllm_config(config, folder, num_gpus)
        leave_a_core(vllm_config)
        keep_float32(vllm_config)
        max_num_seqs = take_places(vllm_config, config.sampling.num_generations)
        recorder, silent = _LoadRecorder(), bool(config.engine.get("disable_log_stats"))
        self._core = EngineCore(vllm_config, None if silent else [lambda _config, _index: recorder, _Prometheus])
        self.check_alive, self.shutdown = self._core.check_alive, self._core.shutdown
        self.sleep, self.wake = self._core.sleep, self._core.wake
        self._recorder = None if silent else recorder
        adapters = config.weights == "adapter"
        self.weights: VllmWeights = AdapterWeights(self._core, lora_request) if adapters else MergedWeights(self._core)
        self._sampling = config.sampling.message
        lora = vllm_config.lora_config
        trusted = config.model.trust_remote_code
        facts = EngineFacts(
            base_model_digest=base_model_digest(folder, trust_remote_code=trusted),
            tokenizer_digest=tokenizer_digest(folder, trust_remote_code=trusted),
            dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
            logprobs_mode=str(vllm_config.model_config.logprobs_mode),
            max_lora_rank=lora.max_lora_rank if lora else 0,
            max_loras=lora.max_loras if lora else 0,
            max_model_len=vllm_config.model_config.max_model_len,
            reward_names=list(config.reward_names),
            quantization=str(config.engine.get("quantization") or ""),
            trainer_quantization=config.model.quantization or "",
        )
        self.capabilities = EngineCapabilities(
            facts,
            folder,
            max_num_seqs,
            holds_versions=self.weights.holds_versions,
            placeholders=placeholders_of(folder),
            vocab_size=vocabulary_size(folder),
            can_sleep=vllm_config.model_config.enable_sleep_mode,
        )

    def note_end(self) -> None:
        """Do nothing: nothing is left of an engine of this process."""

    async def warm_up(self) -> None:
        """Sample one token on the base model. The first request compiles kernels for seconds, and no swap shall wait for that.
        vLLM's linear attention of CPUs takes no prompt of one token."""
        await self.weights.start()
        fields = {"max_tokens": 1, "logprobs": 0} | limits(self._sampling)
        try:
            params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **_for_vllm(fields))
            await self._core.sample("warm-up", prompt_of([0, 0]), params, None, asyncio.Event())
        except ValueError as error:
            raise ConfigError(f"sampling: vLLM refuses it: {error}") from error

    def tool_parser(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> ToolCallParser:
        return ToolCallParser(name, tokenizer, tools)

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event | None = None
    ) -> list[Completion]:
        params = SamplingParams(
            **_for_vllm(group_fields(sampling)),
            flat_logprobs=True,
            detokenize=bool(sampling.stop),  # vLLM searches the text for these strings
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        is_cut = cut or asyncio.Event()
        try:
            output, request = await self.weights.sample(
                lambda request_id, lora, salt: self._core.sample(
                    request_id, prompt_of(prompt_ids, salt), params, lora, is_cut
                ),
                adapter,
            )
        except Exception as error:
            self._core.raise_if_dead(error)
            raise LeaseFailure("generation_failed", f"vLLM refused: {type(error).__name__}: {error}") from error
        samples = sorted(output.outputs, key=lambda sample: sample.index)
        return [_completion(sample, request, may_be_cut=is_cut.is_set()) for sample in samples]

    async def score(self, token_ids: list[int], adapter: Adapter) -> list[float]:
        fields: dict[str, Any] = SCORING
        params = SamplingParams(
            **fields, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        try:
            output, _ = await self.weights.sample(
                lambda request_id, lora, salt: self._core.sample(
                    request_id, prompt_of(token_ids, salt), params, lora, asyncio.Event()
                ),
                adapter,
            )
            return logprobs_of(output, len(token_ids))
        except Exception as error:
            self._core.raise_if_dead(error)
            raise LeaseFailure("generation_failed", f"vLLM refused: {type(error).__name__}: {error}") from error

    def openai_server(self, config: RunConfig) -> Any:
        return load_plugin("slipstream.endpoints", "vllm", "serve.enabled")(self._core, self.weights, config)

    def current_load(self) -> EngineLoad | None:
        if self._recorder is None:
            return None
        load, num_requests = self._recorder.load, self._core.num_requests
        running = min(load.running, num_requests)  # without those that have just been aborted
        return replace(load, running=running, waiting=num_requests - running)

    def watch_load(self, look: Callable[[], None]) -> None:
        if self._recorder is not None:
            self._recorder.look = look

    def outage(self) -> str | None:
        """Return None, because an engine of this process works or is dead."""
        return None


def _for_vllm(fields: dict[str, Any]) -> dict[str, Any]:
    if guides := fields.get("structured_outputs"):
        return fields | {"structured_outputs": StructuredOutputsParams(**guides)}
    return fields


class _LoadRecorder(StatLoggerBase):
    def __init__(self) -> None:
        self._preemptions = self._steps = self._tokens = self._sequences = 0
        self._with_graph: int | None = None  # while no step has told it
        self.load = EngineLoad(0.0, 0, 0, 0)
        self.look: Callable[[], None] = lambda: None

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is None:
            return
        graph = scheduler_stats.cudagraph_stats
        if iteration_stats is not None:
            self._sequences += len(iteration_stats.time_to_first_tokens_iter)
            self._sequences += len(iteration_stats.inter_token_latencies_iter)
        if graph is not None:
            self._steps += 1
            self._tokens += graph.num_unpadded_tokens
            self._with_graph = (self._with_graph or 0) + (graph.runtime_mode != "NONE")
        elif iteration_stats is not None:
            self._steps += 1
            self._tokens += iteration_stats.prompt_token_stats.computed + iteration_stats.num_generation_tokens
        self.load = EngineLoad(
            scheduler_stats.kv_cache_usage,
            scheduler_stats.num_running_reqs,
            scheduler_stats.num_waiting_reqs,
            self._preemptions,
            EngineSteps(self._steps, self._tokens, self._sequences, self._with_graph),
        )
        self.look()

    def log_engine_initialized(self) -> None:
        pass


class _Prometheus(PrometheusStatLogger):
    # Its labels are names of adapters, and vLLM would keep all of them.
    gauge_lora_info = property(lambda self: None, lambda self, gauge: None)


def _completion(sample: Any, request: InFlightRequest, *, may_be_cut: bool) -> Completion:
    cut = sample.finish_reason == "abort" and may_be_cut
    if sample.finish_reason == "abort" and not cut:
        raise EngineError("the engine aborted a request without being asked (its own messages are above)")
    if not cut and sample.finish_reason not in ("stop", "length"):
        raise LeaseFailure("generation_failed", f"vLLM ended a completion with finish_reason={sample.finish_reason!r}")
    token_ids = list(sample.token_ids)
    flat = sample.logprobs
    logprobs = [flat.logprobs[start] for start in flat.start_indices]  # the sampled token leads its position
    assert len(logprobs) == len(token_ids)
    versions = request.token_versions(sample.index, len(token_ids))
    return Completion(token_ids, logprobs, sample.finish_reason == "length", versions, cut)
