"""What a server must be for this run, and how it shows that.

Guarantee: `inspect` returns the name of a server's base model and its longest sequence, or raises ServerMismatchError with the
flag of vLLM, or the key of the configuration, that has to change. What vLLM's HTTP API does not show is `assumptions`.
"""

import asyncio
import itertools
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from producer.engine_server.adapter_folder import ClientFolder
from producer.engine_server.api import TOP, ModelCard, VllmApi
from producer.engine_server.http_client import ServerMismatchError, ServerRefusedError
from producer.engine_server.logprobs_mode import TEMPERATURE, mode_of
from producer.engine_server.trial_adapter import write_trial_adapter
from protocol.config.run import RunConfig
from protocol.wire.handshake import LOGPROBS_MODE

logger = logging.getLogger(__name__)

_PROMPTS = ([3, 4, 5, 6], [8, 7, 6, 5], [9, 3, 8, 4])  # of tokens that every vocabulary has
_CHANGED = 1e-6  # nats, by which an adapter of random numbers changes something


class Inspected(NamedTuple):
    base: str
    max_model_len: int


@dataclass
class Inspection:
    """Of every server of a run alike. `tolerance`, in nats, is what two right computations of a log-prob may differ by;
    `min_model_len` the length that every server must have."""

    config: RunConfig
    model_folder: Path
    folder: ClientFolder
    tolerance: float
    min_model_len: int
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def inspect(self, api: VllmApi) -> Inspected:
        """Raises ServerLostError, too."""
        try:
            await api.check_health()
            base = self._base_model(await api.models())
        except ServerRefusedError as error:
            raise ServerMismatchError(
                f"is no vLLM server ({error}): engine_server.url has to be the address of one"
            ) from error
        try:
            await self._check_logprobs(api, base.id)
        except ServerRefusedError as error:
            flag = f"give it --max-logprobs {TOP}" if "max" in error.message else "it must generate for this run"
            raise ServerMismatchError(f"refuses a request for log-probs ({error.message}): {flag}") from error
        await self._check_adapters(api, base.id)
        assert base.max_model_len is not None
        return Inspected(base.id, base.max_model_len)

    def assumptions(self, num_slots: int | None) -> str:
        """In words. The weights are not among them: every policy is proved by its probe."""
        slots = f", --max-loras of {self.config.max_loras} or more for each producer" if num_slots is None else ""
        return (
            f"--dtype {self.config.model.dtype}, the tokenizer of model.path, no --logits-processors and no synthetic "
            f"acceptance in --speculative-config{slots}"
        )

    def _base_model(self, cards: list[ModelCard]) -> ModelCard:
        base = next((card for card in cards if card.parent is None), None)
        if base is None or base.max_model_len is None:
            raise ServerMismatchError("offers no base model at /v1/models: it has to be a vLLM server for generation")
        ours = (self.config.engine_server and self.config.engine_server.model) or self.config.model.path
        theirs = base.root or base.id
        if theirs != ours and PurePosixPath(theirs).name != PurePosixPath(ours).name:
            raise ServerMismatchError(
                f"serves {theirs}, and the run trains {ours}: start it with `vllm serve {ours}`, or, if it is the same model by "
                f"another name, set engine_server.model={theirs}"
            )
        if base.max_model_len < self.min_model_len:
            raise ServerMismatchError(
                f"takes {base.max_model_len} tokens, and the run needs {self.min_model_len}: give it --max-model-len "
                f"{self.min_model_len} or more, or lower sampling.max_completion_length"
            )
        return base

    async def _check_logprobs(self, api: VllmApi, base: str) -> None:
        for prompt in _PROMPTS:
            at_one = await api.next_token(base, prompt, 1.0)
            finding = mode_of(at_one, await api.next_token(base, prompt, TEMPERATURE))
            if finding == "other":
                raise ServerMismatchError(
                    f"returns log-probs that are not of the distribution it samples from, at temperature {TEMPERATURE}: give it "
                    f"--logprobs-mode {LOGPROBS_MODE}"
                )
            if finding == "processed":
                return
        logger.warning("%s: its log-probs do not show their mode; assumed: --logprobs-mode %s", api.url, LOGPROBS_MODE)

    async def _check_adapters(self, api: VllmApi, base: str) -> None:
        """By an adapter that is written, loaded, asked and removed again."""
        trial = f"trial-{next(self._numbers)}"
        name, prompt = f"{self.folder.name}-{trial}", list(_PROMPTS[0] + _PROMPTS[1])
        await asyncio.to_thread(write_trial_adapter, self.model_folder, self.config.lora, self.folder.path / trial)
        try:
            try:
                await api.load(name, self.folder.server_path(trial))
            except ServerRefusedError as error:
                raise self._cannot_load(error, trial) from error
            try:
                with_adapter, without = await api.score(name, prompt), await api.score(base, prompt)
                slots = await api.num_lora_slots()
            finally:
                await api.unload(name)
        except ServerRefusedError as error:
            raise ServerMismatchError(f"does not score a prompt under an adapter: {error}") from error
        finally:
            await asyncio.to_thread(self.folder.remove, trial)
        if not max(abs(one - other) for one, other in zip(with_adapter, without, strict=True)) > _CHANGED:
            raise ServerMismatchError(
                "loads adapters and does not apply them: its release of vLLM has no LoRA for this model"
            )
        if slots is not None and slots < self.config.max_loras:
            raise ServerMismatchError(
                f"computes {slots} adapters at once, and pipeline.max_staleness needs {self.config.max_loras}: give it "
                f"--max-loras {self.config.max_loras}, or that for each producer that shares it"
            )
        logger.info("%s fits; assumed of it: %s", api.url, self.assumptions(slots))

    def _cannot_load(self, error: ServerRefusedError, trial: str) -> ServerMismatchError:
        path = self.folder.server_path(trial)
        if "LoRA is not enabled" in error.message:
            return ServerMismatchError("does not take adapters: give it --enable-lora")
        if re.search(r"max_lora_rank|LoRA rank", error.message):
            rank = self.config.max_lora_rank
            return ServerMismatchError(
                f"does not take lora.r={self.config.lora['r']} ({error.message}): give it --max-lora-rank {rank}"
            )
        if error.status in (404, 405) and "adapter" not in error.message:
            return ServerMismatchError(
                "does not take adapters while it runs: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
            )
        if error.status == 404:
            return ServerMismatchError(
                f"does not find what this producer writes to engine_server.adapter_dir: it looked at {path}. Mount the folder on "
                "its host, and set engine_server.server_adapter_dir if its path is another one there"
            )
        return ServerMismatchError(f"cannot load an adapter from {path}: {error}; its own log says more")
