"""The checks by which a server shows that this run can use it.

Guarantee: `inspect` returns the name of a server's base model and its longest sequence, or raises ServerMismatchError with the
flag of vLLM, or the key of the configuration, that has to change. `assumptions` names the flags that vLLM's HTTP API does not
show. No weights are read, only their shapes, and torch is not imported.

At temperature 1 all modes that return log-probs agree. At temperature T a processed log-prob is p / T - log Z, where p is the one
at temperature 1 and Z the sum of exp(p / T) over the vocabulary. Tokens that are not known add to Z: their sum of probabilities
and the least known one bound how much. A distribution whose p / T - log Z cannot be told apart from p shows nothing.
"""

import asyncio
import itertools
import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np

from producer.policies.probe import SwapProof
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.http_client import ServerMismatchError, ServerRefusedError
from protocol.wire.handshake import LOGPROBS_MODE
from protocol.wire.model_check import is_of_text_model
from slipstream_extras.engine_server.api import TOP, ModelCard, VllmApi
from slipstream_extras.engine_server.folder import ClientFolder

logger = logging.getLogger(__name__)

_PROMPTS = ([3, 4, 5, 6], [8, 7, 6, 5], [9, 3, 8, 4])  # of tokens that every vocabulary has
_CHANGED = 1e-6  # nats; an adapter of random numbers changes log-probs by more


class Inspected(NamedTuple):
    base: str
    max_model_len: int


@dataclass
class Inspection:
    """The checks of every server of a run. `proof` compares what servers compute; every server must
    take sequences of `min_model_len` tokens."""

    config: RunConfig
    model_folder: Path
    folder: ClientFolder
    proof: SwapProof
    min_model_len: int
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def inspect(self, api: VllmApi) -> Inspected:
        """Check one server. Raises ServerMismatchError if it does not fit, ServerLostError if it does not answer."""
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
        """Name the flags that the API does not show. The weights are not among them: every policy is proved by its probe."""
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
        logger.warning(
            "the log-probs of the server at %s do not show their mode; assuming --logprobs-mode %s",
            api.url,
            LOGPROBS_MODE,
        )

    async def _check_adapters(self, api: VllmApi, base: str) -> None:
        """Write, load, score and remove a small adapter."""
        trial = f"trial-{next(self._numbers)}"
        name, prompt = f"{self.folder.name}-{trial}", list(_PROMPTS[0] + _PROMPTS[1])
        await asyncio.to_thread(
            write_trial_adapter, self.model_folder, self.config.lora_section, self.folder.path / trial
        )
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
        logger.info("the server at %s fits; assuming that it has: %s", api.url, self.assumptions(slots))

    def _cannot_load(self, error: ServerRefusedError, trial: str) -> ServerMismatchError:
        path = self.folder.server_path(trial)
        if "LoRA is not enabled" in error.message:
            return ServerMismatchError("does not take adapters: give it --enable-lora")
        if re.search(r"max_lora_rank|LoRA rank", error.message):
            rank = self.config.max_lora_rank
            return ServerMismatchError(
                f"does not take lora.r={self.config.lora_section['r']} ({error.message}): give it --max-lora-rank {rank}"
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


TEMPERATURE = 0.7

Finding = Literal["processed", "other", "nothing"]
_TOLERANCE = 0.1  # nats, by which log-probs of one prompt may differ from request to request


def mode_of(at_one: dict[str, float], at_temperature: dict[str, float]) -> Finding:
    """Compare the log-probs of the likeliest tokens in two requests of one prompt, at temperature 1 and at `TEMPERATURE`."""
    both = sorted(at_one.keys() & at_temperature.keys())
    if not both or any(_sum_of_exp(values.values()) > math.exp(_TOLERANCE) for values in (at_one, at_temperature)):
        return "other"  # these are no log-probs
    divided = [at_one[token] / TEMPERATURE for token in both]
    shifts = [at_temperature[token] - value for token, value in zip(both, divided, strict=True)]
    unchanged = [at_one[token] - value for token, value in zip(both, divided, strict=True)]
    low, high = _log_z_bounds(list(at_one.values()))
    if _spread(unchanged) <= 2 * _TOLERANCE:
        return "nothing"
    shift = (max(shifts) + min(shifts)) / 2
    is_processed = _spread(shifts) <= _TOLERANCE and -high - _TOLERANCE <= shift <= -low + _TOLERANCE
    return "processed" if is_processed else "other"


def _log_z_bounds(logprobs: list[float]) -> tuple[float, float]:
    known = _sum_of_exp(value / TEMPERATURE for value in logprobs)
    rest = max(0.0, 1.0 - _sum_of_exp(logprobs))
    most = rest * math.exp(min(logprobs) * (1 / TEMPERATURE - 1))
    return math.log(known), math.log(known + most)


def _sum_of_exp(values: Iterable[float]) -> float:
    return math.fsum(math.exp(min(value, 50.0)) for value in values)  # logits may be large


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


_SEED = 0
_IN_EVERY_FAMILY = "_proj"


def write_trial_adapter(model_folder: Path, lora: dict[str, Any], folder: Path) -> None:
    """Write a small adapter of rank `lora.r` to `folder`, which must not exist. It changes one linear layer by about as much as
    that layer has, equally in every process. Raises ConfigError if no layer of the model fits, OSError if it cannot be
    written."""
    from safetensors.numpy import save

    name, (outputs, inputs) = _layer(model_folder, lora["target_modules"])
    rank, module = int(lora["r"]), name.removesuffix(".weight")
    random = np.random.default_rng(_SEED)
    lora_a = random.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32)
    lora_b = random.normal(0, rank**-0.5, (outputs, rank)).astype(np.float32)
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [module.rpartition(".")[2]],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    key = f"base_model.model.{module}"
    tensors = {f"{key}.lora_A.weight": lora_a, f"{key}.lora_B.weight": lora_b}
    content = save(tensors, {"format": "pt"})  # `save_file` raises other errors
    (folder / "adapter_model.safetensors").write_bytes(content)


def _layer(model_folder: Path, target_modules: Any) -> tuple[str, tuple[int, int]]:
    """Return name and shape (outputs, inputs) of the weights of a linear layer that the run trains."""
    from safetensors import safe_open

    for file in sorted(model_folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as weights:
            for name in sorted(weights.keys()):
                shape = weights.get_slice(name).get_shape()
                if len(shape) == 2 and name.endswith(".weight") and _is_trained(name, target_modules):
                    return name, (shape[0], shape[1])
    raise ConfigError(
        f"model.path: no file of weights (*.safetensors) in {model_folder} has a linear layer that lora.target_modules "
        f"({target_modules}) names, so the server cannot show that it applies adapters"
    )


def _is_trained(name: str, target_modules: Any) -> bool:
    module = name.removesuffix(".weight").rpartition(".")[2]
    if not is_of_text_model(name):
        return False
    if isinstance(target_modules, Iterable) and not isinstance(target_modules, str):
        return module in target_modules
    return module.endswith(_IN_EVERY_FAMILY) and ".experts." not in name
