"""The vLLM engine: the only module that imports vLLM, and the place for differences between its releases (0.26 to 0.32).

Guarantee: `generate` returns what was sampled on exactly the adapter it names, with log-probs of the distribution that
was sampled from; an engine that died is an `EngineError`, everything else that vLLM refuses is data.
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; only the CPU build reads it, its default is half the memory

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from producer.engine.arguments import num_parts, own_arguments
from producer.engine.merged import InFlightRequest, MergedWeights
from producer.engine.preparation import prepare
from producer.engine.tool_calls import ToolCallParser
from producer.interfaces import Adapter, AdapterRefusedError, Completion, EngineLoad, LeaseFailure
from protocol.config.library_section import build
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, EngineError
from protocol.files.scratch import scratch_folder
from protocol.wire.digests import base_model_digest, cannot_load, resolve_model, tokenizer_digest
from protocol.wire.messages import EngineFacts, Sampling

if TYPE_CHECKING:
    from producer.engine.openai_server import OpenAIServer


def check_engine_section(config: RunConfig) -> None:
    """Has vLLM validate `engine:` against the model's configuration, without loading weights.

    Raises:
        ConfigError: vLLM does not know a key or refuses a value.
    """
    _vllm_config(config, _model_folder(config), num_gpus=num_parts(config))


def _model_folder(config: RunConfig) -> Path:
    model = config.model
    return resolve_model(model.path, model.revision, trust_remote_code=model.trust_remote_code)


def _vllm_config(config: RunConfig, folder: Path, num_gpus: int) -> Any:
    ours = own_arguments(config, folder, num_gpus)
    alone = ours["tensor_parallel_size"] * num_parts(config) == 1
    chosen = (_ON_CPU if alone and current_platform.is_cpu() else {}) | config.engine
    arguments = build("engine", AsyncEngineArgs, chosen, **ours)
    try:
        vllm_config = arguments.create_engine_config()
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise cannot_load(f"{folder}/config.json", error) from error
        said = str(error).partition(" [type=")[0]  # pydantic goes on with a dump of all arguments
        raise ConfigError(f"engine: refused by vLLM: {said}") from error
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError("engine.load_format: `dummy` weights are not those that the trainer trains; remove it")
    if getattr(vllm_config.speculative_config, "rejection_sample_method", None) == "synthetic":
        raise ConfigError(
            "engine.speculative_config: with rejection_sample_method=synthetic tokens are not drawn from the "
            "distribution whose log-probs are reported; use another method"
        )
    if config.swap.mode == "merged":
        _check_mergeable(vllm_config)
    return vllm_config


_ON_CPU = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
"""Where vLLM's own choice computes in one more process, and the core that waits for it spins on a CPU that it needs."""


def _leave_a_core(vllm_config: Any) -> None:
    """Where the engine computes in one process of its own, as vLLM does where it has several. Threads wait for each other many
    times a step; one that has to share its core holds up all."""
    if vllm_config.parallel_config.distributed_executor_backend == _ON_CPU["distributed_executor_backend"]:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """In the environment of the processes that begin within, and of no others."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _check_mergeable(vllm_config: Any) -> None:
    on_cpu = current_platform.is_cpu()
    for cannot, reason in (
        (vllm_config.quant_config is not None, "quantized weights cannot take up an adapter without another rounding"),
        (not (on_cpu or current_platform.is_cuda_alike()), "it is known to work on CUDA, ROCm and CPU only"),
        (on_cpu and not vllm_config.model_config.enforce_eager, "on a CPU it needs engine.enforce_eager: true"),
        (vllm_config.speculative_config is not None, "it counts one token per step; remove engine.speculative_config"),
        (
            vllm_config.parallel_config.pipeline_parallel_size > 1,
            "it needs all layers in one place; remove engine.pipeline_parallel_size",
        ),
    ):
        if cannot:
            raise ConfigError(f"swap.mode: merged cannot be used here: {reason}; or set swap.mode: adapter")


class Engine:
    """One vLLM `AsyncLLM`. Loading blocks; everything else is asyncio.

    Raises:
        ConfigError: vLLM refuses the `engine:` section.
        EngineError: the engine does not start.
    """

    def __init__(self, config: RunConfig, num_gpus: int) -> None:
        folder = _model_folder(config)
        vllm_config = _vllm_config(config, folder, num_gpus)
        _leave_a_core(vllm_config)
        silent = bool(config.engine.get("disable_log_stats"))
        self._recorder = None if silent else _LoadRecorder()
        self._sockets = ExitStack()  # vLLM leaves them, after a kill or not
        sockets = self._sockets.enter_context(scratch_folder())
        try:
            with _variable("VLLM_RPC_BASE_PATH", str(sockets)):
                self._running: Any = AsyncLLM.from_vllm_config(
                    vllm_config,
                    stat_loggers=None if silent else [lambda _config, _index: self._recorder, _Prometheus],
                    disable_log_stats=silent,
                )
        except Exception as error:
            self._sockets.close()
            raise EngineError(f"the engine did not start: {error} (its own messages are above)") from error
        self._merged = MergedWeights(self._call_workers) if config.swap.mode == "merged" else None
        self._request_ids = itertools.count()
        self._loaded_ids: set[int] = set()
        lora = vllm_config.lora_config
        self.folder = folder
        self.max_num_seqs: int = vllm_config.scheduler_config.max_num_seqs
        self.facts = EngineFacts(
            base_model_digest=base_model_digest(folder, trust_remote_code=config.model.trust_remote_code),
            tokenizer_digest=tokenizer_digest(folder, trust_remote_code=config.model.trust_remote_code),
            dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
            logprobs_mode=str(vllm_config.model_config.logprobs_mode),
            max_lora_rank=lora.max_lora_rank if lora else 0,
            max_loras=lora.max_loras if lora else 0,
            max_model_len=vllm_config.model_config.max_model_len,
            reward_names=list(config.reward_names),
        )

    async def warm_up(self) -> None:
        """One token on the base model: the first request compiles kernels for seconds, and no swap shall wait for that."""
        await self._call_workers("merging_start" if self._merged else "loading_start")
        params = SamplingParams(max_tokens=1, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
        await self._sample("warm-up", _prompt([0]), params, None, asyncio.Event())

    def tool_parser(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> ToolCallParser:
        return ToolCallParser(name, tokenizer, tools)

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event | None = None
    ) -> list[Completion]:
        """Samples one group.

        Args:
            cut: when it is set, completions that have not ended are returned as they are.

        Raises:
            LeaseFailure: vLLM refuses this request.
            EngineError: the engine is dead.
        """
        params = SamplingParams(
            n=sampling.num_generations,
            max_tokens=sampling.max_completion_length,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        cut, flight = cut or asyncio.Event(), None
        try:
            if self._merged is None:
                request_id, lora = f"group-{next(self._request_ids)}", _lora_request(adapter)
                output = await self._sample(request_id, _prompt(prompt_ids), params, lora, cut)
            else:
                output, flight = await self._merged.sample(
                    lambda request_id, salt: self._sample(request_id, _prompt(prompt_ids, salt), params, None, cut)
                )
        except EngineDeadError as error:
            raise EngineError("the engine died while generating (its own messages are above)") from error
        except Exception as error:
            self._raise_if_dead(error)
            raise LeaseFailure("generation_failed", f"vLLM refused: {type(error).__name__}: {error}") from error
        samples = sorted(output.outputs, key=lambda sample: sample.index)
        return [_completion(sample, flight, may_be_cut=cut.is_set()) for sample in samples]

    async def _sample(
        self, request_id: str, prompt: Any, params: SamplingParams, lora: LoRARequest | None, cut: asyncio.Event
    ) -> Any:
        """As `AsyncLLM.generate`, which does not tell the id under which n completions can be aborted without a trace."""
        request = await self._llm.add_request(request_id, prompt, params, lora_request=lora)
        output, cutting = asyncio.ensure_future(request.get()), asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait({output, cutting}, return_when=asyncio.FIRST_COMPLETED)
            if not output.done():
                await self._llm.abort(request.request_id, internal=True)  # puts out what there is
            sampled = await output
        except asyncio.CancelledError:
            output.cancel()
            if self._running is not None:
                await self._running.abort(request.request_id, internal=True)
            raise
        finally:
            cutting.cancel()
        assert sampled.lora_request == lora, f"sampled on {sampled.lora_request}, not {lora}"
        return sampled

    async def score(self, token_ids: list[int], adapter: Adapter) -> list[float]:
        """The engine's log-probs of each of these tokens but the first, at temperature 1 and without cached KV.

        Raises:
            AdapterRefusedError: vLLM refuses to score this.
            EngineError: the engine is dead.
        """
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,  # of the token itself alone
            flat_logprobs=True,
            detokenize=False,
            skip_reading_prefix_cache=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = f"score-{next(self._request_ids)}"
        try:
            lora, salt = (None, self._merged.salt) if self._merged else (_lora_request(adapter), "")
            output = await self._sample(request_id, _prompt(token_ids, salt), params, lora, asyncio.Event())
        except EngineDeadError as error:
            raise EngineError(f"the engine died while scoring under {adapter.name}") from error
        except Exception as error:
            self._raise_if_dead(error)
            raise AdapterRefusedError(f"vLLM does not score {len(token_ids)} tokens: {error}") from error
        flat = output.prompt_logprobs
        logprobs = [flat.logprobs[start] for start in flat.start_indices[1:]]  # nothing precedes the first token
        assert len(logprobs) == len(token_ids) - 1
        return logprobs

    async def load_adapter(self, adapter: Adapter) -> None:
        """Reads the adapter into the engine, while requests run.

        Raises:
            AdapterRefusedError: vLLM cannot load it.
            EngineError: the engine is dead.
        """
        if self._merged is not None:
            await self._merged.load(adapter)
            return
        assert adapter.id not in self._loaded_ids, "vLLM would go on serving the weights that it knows under this id"
        try:
            await prepare(self._call_workers, "loading", (adapter.name, adapter.id, str(adapter.path)))
        except AdapterRefusedError:
            await self._remove(adapter)  # another worker may have taken it
            raise
        self._loaded_ids.add(adapter.id)

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Only for an adapter that no request names; vLLM would read it again, or die. Merged weights are taken back."""
        if self._merged is not None:
            await self._merged.discard(adapter)
            return
        await self._remove(adapter)
        self._loaded_ids.remove(adapter.id)

    async def _remove(self, adapter: Adapter) -> None:
        try:
            await self._llm.remove_lora(adapter.id)
        except Exception as error:
            raise EngineError(f"the engine failed to unload {adapter.name}: {error}") from error

    def adopt_adapter(self, adapter: Adapter) -> None:
        """What is loaded is good; requests may begin on it."""
        if self._merged is not None:
            self._merged.adopt(adapter)

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        try:
            answers: list[Any] = await self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise EngineError(f"the engine failed in {method}: {error} (its own messages are above)") from error
        return answers

    def openai_server(self, config: RunConfig) -> "OpenAIServer":
        """What answers OpenAI requests on this engine."""
        from producer.engine.openai_server import OpenAIServer

        return OpenAIServer(self._llm, self._merged, _lora_request, config)

    def load(self) -> EngineLoad | None:
        """As of the last engine step; None with `engine.disable_log_stats`."""
        return self._recorder.load if self._recorder else None

    def shutdown(self) -> None:
        """Ends the engine core. Idempotent. What is asked of the engine from then on is an `EngineError`."""
        if self._running is not None:
            self._running.shutdown()
            self._running = None  # its __del__ must not run when the interpreter is half gone
            self._sockets.close()

    @property
    def _llm(self) -> Any:
        if self._running is None:
            raise EngineError("the engine has been shut down")
        return self._running

    def check_alive(self) -> None:
        """Costs nothing: vLLM watches its core's process and notes its end.

        Raises:
            EngineError: the engine is dead, also while no request is in it.
        """
        if self._llm.errored:
            raise EngineError("the engine core has ended (its own messages are above)")

    def _raise_if_dead(self, error: Exception) -> None:
        if self._llm.errored:
            raise EngineError(f"the engine died: {error}") from error


class _LoadRecorder(StatLoggerBase):
    """vLLM tells it what happened in every engine step."""

    def __init__(self) -> None:
        self.load = EngineLoad(0.0, 0, 0, 0)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        preemptions = self.load.preemptions + (iteration_stats.num_preempted_reqs if iteration_stats else 0)
        self.load = replace(self.load, preemptions=preemptions)
        if scheduler_stats is not None:
            stats = scheduler_stats
            self.load = EngineLoad(stats.kv_cache_usage, stats.num_running_reqs, stats.num_waiting_reqs, preemptions)

    def log_engine_initialized(self) -> None:
        pass


class _Prometheus(PrometheusStatLogger):
    # Its labels are names of adapters, which would stay for ever.
    gauge_lora_info = property(lambda self: None, lambda self, gauge: None)


def _prompt(token_ids: list[int], salt: str = "") -> Any:
    """Requests share KV with those of the same salt only."""
    return {"type": "token", "prompt_token_ids": token_ids} | ({"cache_salt": salt} if salt else {})


def _lora_request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.id, str(adapter.path))


def _completion(sample: Any, flight: InFlightRequest | None, *, may_be_cut: bool) -> Completion:
    cut = sample.finish_reason == "abort" and may_be_cut
    if not cut and sample.finish_reason not in ("stop", "length"):
        raise EngineError(f"the engine aborted a request (finish_reason={sample.finish_reason!r})")
    token_ids = list(sample.token_ids)
    flat = sample.logprobs
    logprobs = [flat.logprobs[start] for start in flat.start_indices]  # the sampled token leads its position
    assert len(logprobs) == len(token_ids)
    versions = flight.token_versions(sample.index, len(token_ids)) if flight else None
    return Completion(token_ids, logprobs, sample.finish_reason == "length", versions, cut)
