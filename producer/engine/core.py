"""The core of vLLM, and its errors.

Guarantee: every call to a core that died raises `EngineError`. A request that is cancelled leaves the core.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from glob import has_magic
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from producer.engine_contract import NUM_SAMPLED, Adapter, AdapterFailedError, AdapterRefusedError, Rows, Scored
from protocol.errors import EngineError
from protocol.runtime.scratch import scratch_folder
from protocol.runtime.user import plain_path

_FIRST = -1  # priority of a probe: before all other requests


class EngineCore:
    """A vLLM `AsyncLLM`. The constructor blocks, and raises EngineError if the engine does not start.

    Args:
        stat_loggers: classes to which vLLM reports its steps. Without them it counts nothing.
    """

    def __init__(self, vllm_config: Any, stat_loggers: list[Any] | None) -> None:
        self._probe_ids = itertools.count()
        self._breach = ""  # the reason why requests may have run on another policy than theirs
        self._sockets = ExitStack()  # it removes their folder, because vLLM does not
        sockets = self._sockets.enter_context(scratch_folder())
        if has_magic(
            model := vllm_config.model_config.model
        ):  # vLLM looks for weights by a pattern that begins with it
            vllm_config.model_config.model = plain_path(model)
        try:
            with _variable("VLLM_RPC_BASE_PATH", str(sockets)):
                self._running: Any = AsyncLLM.from_vllm_config(
                    vllm_config, stat_loggers=stat_loggers, disable_log_stats=stat_loggers is None
                )
        except Exception as error:
            self._sockets.close()
            raise EngineError(f"the engine did not start: {error} (its own messages are above)") from error

    @property
    def llm(self) -> Any:
        if self._running is None:
            raise EngineError("the engine has been shut down")
        return self._running

    @property
    def num_requests(self) -> int:
        """The number of completions and probes that were asked for and have not ended."""
        return 0 if self._running is None else self._running.get_num_unfinished_requests()

    async def sample(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        lora: LoRARequest | None,
        cut: asyncio.Event,
        priority: int = 0,
    ) -> Any:
        """Generate as `AsyncLLM.generate` does. That method hides the id that aborts all n completions. When `cut` is set,
        return early, with the tokens that were sampled so far."""
        request = await self.llm.add_request(request_id, prompt, params, lora_request=lora, priority=priority)
        output, cutting = asyncio.ensure_future(request.get()), asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait({output, cutting}, return_when=asyncio.FIRST_COMPLETED)
            if not output.done():
                await self.llm.abort(request.request_id, internal=True)  # the output so far follows
            sampled = await output
        except asyncio.CancelledError:
            output.cancel()
            if self._running is not None:
                await self._running.abort(request.request_id, internal=True)
            raise
        finally:
            cutting.cancel()
        self.check_lora(sampled, lora)
        return sampled

    def check_lora(self, output: Any, lora: LoRARequest | None) -> None:
        """Raise EngineError if an output was sampled on another LoRA than `lora`. From then on, `check_alive` raises it, too."""
        if output.lora_request != lora:
            self._breach = f"vLLM sampled on {output.lora_request}, and the request was for {lora}"
            raise EngineError(self._breach)

    async def verify(self, rows: Rows, lora: LoRARequest | None, salt: str, *, is_base: bool) -> list[Scored]:
        """Sample `NUM_SAMPLED` tokens after each row, as a rollout does, and score the row and these tokens. For the base, score
        the row alone. A step of the engine computes at most one row more than its requests. Raise AdapterRefusedError if vLLM
        refuses to score them, and AdapterFailedError if it failed."""
        longest = self.llm.model_config.max_model_len - NUM_SAMPLED - 1
        fitting = [list(row[:longest]) for row in rows]
        if is_base:
            return [Scored(await self._score(row, lora, salt)) for row in fitting]
        return [await self._verify(row, lora, salt) for row in fitting]

    async def _verify(self, row: list[int], lora: LoRARequest | None, salt: str) -> Scored:
        output = await self._ask(row, lora, salt, max_tokens=NUM_SAMPLED, ignore_eos=True, logprobs=0)
        (sample,) = output.outputs
        if len(token_ids := list(sample.token_ids)) != NUM_SAMPLED:
            raise AdapterFailedError(f"vLLM ended a probe with finish_reason={sample.finish_reason!r}")
        logprobs = await self._score(row + token_ids, lora, salt)
        sampled = [sample.logprobs.logprobs[start] for start in sample.logprobs.start_indices]
        return Scored(logprobs[:-NUM_SAMPLED], sampled, logprobs[-NUM_SAMPLED:], output.num_cached_tokens or 0)

    async def _score(self, token_ids: list[int], lora: LoRARequest | None, salt: str) -> list[float]:
        """Return the log-probs of all these tokens but the first, at temperature 1 and without cached KV."""
        return logprobs_of(await self._ask(token_ids, lora, salt, **SCORING), len(token_ids))

    async def _ask(self, token_ids: list[int], lora: LoRARequest | None, salt: str, **fields: Any) -> Any:
        params = SamplingParams(
            **fields, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        request_id = f"probe-{next(self._probe_ids)}"
        try:
            return await self.sample(request_id, prompt_of(token_ids, salt), params, lora, asyncio.Event(), _FIRST)
        except Exception as error:
            self.raise_if_dead(error)
            raise AdapterRefusedError(f"vLLM does not score {len(token_ids)} tokens: {error}") from error

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, between two steps."""
        try:
            answers: list[Any] = await self.llm.collective_rpc(method, args=args)
        except Exception as error:
            raise EngineError(f"the engine failed in {method}: {error} (its own messages are above)") from error
        return answers

    async def sleep(self) -> None:
        """Move the weights and the adapters to host memory, and drop the KV cache. No request may be in the engine."""
        try:
            await self.llm.sleep(1)
        except Exception as error:
            raise EngineError(f"the engine did not fall asleep: {error} (its own messages are above)") from error

    async def wake(self) -> None:
        try:
            await self.llm.wake_up()
        except Exception as error:
            raise EngineError(
                f"the engine did not wake: {error} (its own messages are above); is another process on its GPU?"
            ) from error

    def check_alive(self) -> None:
        """Raise EngineError if the engine is dead or has served another policy. This is cheap, because vLLM watches the process
        of its core."""
        if self._breach:
            raise EngineError(self._breach)
        if self.llm.errored:
            raise EngineError("the engine core has ended (its own messages are above)")

    def raise_if_dead(self, error: Exception) -> None:
        """Raise EngineError if `error` shows that the engine is dead."""
        if isinstance(error, EngineError):
            raise error
        if isinstance(error, EngineDeadError) or self.llm.errored:
            raise EngineError(f"the engine died: {error} (its own messages are above)") from error

    def shutdown(self) -> None:
        """End the engine core, unless it has ended. Every other method raises EngineError from then on."""
        if self._running is not None:
            self._running.shutdown()
            self._running = None  # so that its __del__ does not run while the interpreter ends
            self._sockets.close()


SCORING = {"max_tokens": 1, "prompt_logprobs": 0, "skip_reading_prefix_cache": True}  # 0: without other tokens
"""The fields of a request for the log-probs of the tokens of its prompt."""


def logprobs_of(output: Any, num_tokens: int) -> list[float]:
    """Return the log-probs of all tokens of a prompt but the first. Raise AdapterFailedError if there are none."""
    flat = output.prompt_logprobs
    if flat is None:
        reason = output.outputs[0].finish_reason
        raise AdapterFailedError(f"vLLM ended the scoring of {num_tokens} tokens with finish_reason={reason!r}")
    logprobs = [flat.logprobs[start] for start in flat.start_indices[1:]]  # nothing precedes the first token
    assert len(logprobs) == num_tokens - 1
    return logprobs


def prompt_of(token_ids: list[int], salt: str = "") -> Any:
    """Build a prompt that shares KV only with prompts of the same salt."""
    return {"type": "token", "prompt_token_ids": token_ids} | ({"cache_salt": salt} if salt else {})


def lora_request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.id, str(adapter.path))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable for the processes that begin within, and for no others."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
