"""The vLLM engine: the only module that imports vLLM, and the place for differences between its releases (0.26 to 0.32).

Guarantee: `generate` returns what was sampled on exactly the adapter it names, with log-probs of the distribution that
was sampled from; an engine that died is an `EngineError`, everything else that vLLM refuses is data.
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; only the CPU build reads it, its default is half the memory

import itertools
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from producer.interfaces import Adapter, AdapterRefusedError, Completion, LeaseFailure
from protocol.config import RunConfig
from protocol.digests import base_model_digest, resolve_model, tokenizer_digest
from protocol.errors import ConfigError, EngineError
from protocol.handshake import LOGPROBS_MODE
from protocol.library_section import build
from protocol.messages import EngineFacts, Sampling


def check_engine_section(config: RunConfig) -> None:
    """Has vLLM validate `engine:` against the model's configuration, without loading weights.

    Raises:
        ConfigError: vLLM does not know a key or refuses a value.
    """
    _vllm_config(config, resolve_model(config.model.path, config.model.revision), num_gpus=1)


def _vllm_config(config: RunConfig, folder: Path, num_gpus: int) -> Any:
    arguments = build(
        "engine",
        AsyncEngineArgs,
        {"disable_log_stats": True, **config.engine},
        model=str(folder),
        dtype=config.model.dtype,
        seed=config.seed,
        tensor_parallel_size=num_gpus,
        enable_lora=True,
        max_loras=config.max_loras,
        max_cpu_loras=config.max_loras + 1,  # the one being loaded must not evict one that is in use
        max_lora_rank=config.max_lora_rank,
        logprobs_mode=LOGPROBS_MODE,
    )
    try:
        vllm_config = arguments.create_engine_config()
    except Exception as error:
        said = str(error).partition(" [type=")[0]  # pydantic goes on with a dump of all arguments
        raise ConfigError(f"engine: refused by vLLM: {said}") from error
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError("engine.load_format: `dummy` weights are not those that the trainer trains; remove it")
    if getattr(vllm_config.speculative_config, "rejection_sample_method", None) == "synthetic":
        raise ConfigError(
            "engine.speculative_config: with rejection_sample_method=synthetic tokens are not drawn from the "
            "distribution whose log-probs are reported; use another method"
        )
    return vllm_config


class Engine:
    """One vLLM `AsyncLLM`. Loading blocks; everything else is asyncio.

    Raises:
        ConfigError: vLLM refuses the `engine:` section.
        EngineError: the engine does not start.
    """

    def __init__(self, config: RunConfig, num_gpus: int) -> None:
        folder = resolve_model(config.model.path, config.model.revision)
        vllm_config = _vllm_config(config, folder, max(1, num_gpus))
        try:
            self._llm = AsyncLLM.from_vllm_config(
                vllm_config, disable_log_stats=bool(config.engine.get("disable_log_stats", True))
            )
        except Exception as error:
            raise EngineError(f"the engine did not start: {error} (its own messages are above)") from error
        self._request_ids = itertools.count()
        self._loaded_ids: set[int] = set()
        self.folder = folder
        self.max_num_seqs: int = vllm_config.scheduler_config.max_num_seqs
        self.facts = EngineFacts(
            base_model_digest=base_model_digest(folder),
            tokenizer_digest=tokenizer_digest(folder),
            dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
            logprobs_mode=str(vllm_config.model_config.logprobs_mode),
            max_lora_rank=vllm_config.lora_config.max_lora_rank,
            max_loras=vllm_config.lora_config.max_loras,
            max_model_len=vllm_config.model_config.max_model_len,
            reward_names=list(config.rewards.names),
        )

    async def warm_up(self) -> None:
        """One token on the base model: the first request compiles kernels for seconds, and no swap shall wait for that."""
        async for _ in self._llm.generate(_prompt([0]), SamplingParams(max_tokens=1, logprobs=0), "warm-up"):
            pass

    async def generate(self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter) -> list[Completion]:
        """Samples one group.

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
        request_id = f"group-{next(self._request_ids)}"
        try:
            stream = self._llm.generate(_prompt(prompt_ids), params, request_id, lora_request=_lora_request(adapter))
            (output,) = [output async for output in stream]
        except EngineDeadError as error:
            raise EngineError("the engine died while generating (its own messages are above)") from error
        except Exception as error:
            self._raise_if_dead(error)
            raise LeaseFailure("generation_failed", f"vLLM refused: {type(error).__name__}: {error}") from error
        assert output.lora_request == _lora_request(adapter), f"sampled on {output.lora_request}, not {adapter.name}"
        return [_completion(sample) for sample in sorted(output.outputs, key=lambda sample: sample.index)]

    async def load_adapter(self, adapter: Adapter) -> None:
        """Reads the adapter into the engine, while requests run.

        Raises:
            AdapterRefusedError: vLLM cannot load it.
            EngineError: the engine is dead.
        """
        assert adapter.id not in self._loaded_ids, "vLLM would go on serving the weights that it knows under this id"
        try:
            loaded = await self._llm.add_lora(_lora_request(adapter))
        except EngineDeadError as error:
            raise EngineError(f"the engine died while loading {adapter.name}") from error
        except Exception as error:
            self._raise_if_dead(error)
            raise AdapterRefusedError(str(error)) from error
        if not loaded:
            raise AdapterRefusedError(f"vLLM did not load {adapter.name} and gives no reason")
        self._loaded_ids.add(adapter.id)

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Only for an adapter that no request names; vLLM would read it again, or die."""
        try:
            await self._llm.remove_lora(adapter.id)
        except Exception as error:
            raise EngineError(f"the engine failed to unload {adapter.name}: {error}") from error
        self._loaded_ids.remove(adapter.id)

    def shutdown(self) -> None:
        """Ends the engine core. Idempotent."""
        if hasattr(self, "_llm"):
            self._llm.shutdown()
            del self._llm  # its __del__ must not run when the interpreter is half gone

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


def _prompt(token_ids: list[int]) -> Any:
    return {"type": "token", "prompt_token_ids": token_ids}


def _lora_request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.id, str(adapter.path))


def _completion(sample: Any) -> Completion:
    if sample.finish_reason not in ("stop", "length"):
        raise EngineError(f"the engine aborted a request (finish_reason={sample.finish_reason!r})")
    token_ids = list(sample.token_ids)
    flat = sample.logprobs
    logprobs = [flat.logprobs[start] for start in flat.start_indices]  # the sampled token leads its position
    assert len(logprobs) == len(token_ids)
    return Completion(token_ids, logprobs, truncated=sample.finish_reason == "length")
