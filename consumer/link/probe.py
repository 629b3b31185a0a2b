"""The trainer's side of the probe: tokens of real prompts, and what the model that is trained computes of them.

Guarantee: the tokens depend on dataset, tokenizer and seed alone, so every version and every process of a run has the same. Their
log-probs are at temperature 1, without dropout. Nothing that training depends on changes, and every rank makes the same passes.

The policy is measured in the arithmetic of the engine's kind: as the loss computes it, or with the adapter merged into the
weights and rounded to their dtype (`swap.mode: merged`). A 16-bit format adds noise to that and swallows small changes, in
engine and trainer alike. So it is measured in float32 too, which shows in which direction each log-prob moves (see
`producer.policies.probe`). Layers are cast one at a time.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.tuners.lora.layer import Linear
from torch.distributed.fsdp import FSDPModule

from consumer.link.merging import merged_weight
from protocol.errors import ConfigError, DatasetError
from protocol.wire.messages import Probe, unknown_token
from protocol.wire.model_folder import ANY_SIZE

logger = logging.getLogger(__name__)

NUM_ROWS = 2
ROW_LENGTH = 144  # tokens: more than a block of vLLM's prefix cache, which has 128 on a CPU
_MAX_PROMPTS = 256  # that are read
_HALVES = (torch.float16, torch.bfloat16)


def probe_rows(
    prompts: Any, tokenizer: Any, seed: int, longest: int = ROW_LENGTH, vocab_size: int = ANY_SIZE
) -> np.ndarray:
    """Return token ids, int32 (NUM_ROWS, L): the dataset from a row on that the seed chooses, over again if it is short.

    Args:
        longest: tokens that the model takes; L is at most that.
        vocab_size: of how many tokens it has embeddings.

    Raises:
        ConfigError: a prompt has a token that the model does not have.
    """
    length, first = min(ROW_LENGTH, longest), seed % len(prompts)
    ids: list[int] = []
    for offset in range(min(_MAX_PROMPTS, len(prompts))):
        try:
            prompt, _ = prompts[(first + offset) % len(prompts)]
        except DatasetError:
            continue
        text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
        own = tokenizer(text)["input_ids"]
        if problem := unknown_token(tokenizer, own, vocab_size):
            raise ConfigError(f"{prompts.place((first + offset) % len(prompts))} {problem}")
        ids += own
        if len(ids) >= NUM_ROWS * length:
            break
    return np.resize(np.array(ids or [0], np.int32), (NUM_ROWS, length))


def longest_of(model: Any) -> int:
    """Return the number of tokens that a model takes, by its configuration."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", ROW_LENGTH))


class Measurement(NamedTuple):
    """The probe of one version. `logprobs`, float32 (1 or 2, N), are its `policy` and `exact`, and may still be on their way;
    None for a version that is not measured."""

    known: Probe
    logprobs: torch.Tensor | None

    def on_way_to_host(self) -> "Measurement":
        """Copy the numbers to host memory. On a GPU nobody waits for it, and an event that is recorded now comes after it."""
        if self.logprobs is None:
            return self
        on_gpu = self.logprobs.is_cuda
        there = torch.empty(self.logprobs.shape, dtype=torch.float32, pin_memory=on_gpu)
        return self._replace(logprobs=there.copy_(self.logprobs, non_blocking=on_gpu))

    def probe(self) -> Probe:
        """Return the probe as it travels, once the numbers are there."""
        known = self.known
        if self.logprobs is None:
            return known
        policy, *exact = (row.tobytes() for row in self.logprobs.cpu().numpy().astype("<f4"))
        return Probe(known.token_ids, known.row_length, known.base, known.exact_base, policy, *exact)


@dataclass(eq=False)
class PolicyProbe:
    """Measures the first `every` policies of `model`, and every `every`-th; none if it is 0.

    Args:
        rows: token ids, int32 (R, L).
        model: a PeftModel, or one whose own weights train.
        autocast: makes the context of the trainer's forward passes.
        merged: whether the adapter is merged into weights of the base's dtype.
    """

    rows: np.ndarray
    every: int
    model: Any
    autocast: Callable[[], AbstractContextManager[None]]
    merged: bool = False
    _known: Probe | None = None
    _first: int | None = None  # version
    _has_exact: bool = True

    def measure(self, version: int) -> Measurement | None:
        """Measure the present policy, which is this version. The first call measures the base as well."""
        if not self.every:
            return None
        if self._known is None:
            with self.model.disable_adapter():
                self.measure_base()
        assert self._known is not None
        if self._first is None:
            self._first = version
        is_due = version - self._first < self.every or version % self.every == 0
        return Measurement(self._known, self._passes(is_base=False) if is_due else None)

    def measure_base(self) -> None:
        """Measure the base, which the model must be now: one whose own weights train, or whose adapter begins with a part of
        them, is it only as it was loaded."""
        if self.every:
            base, *exact = self._passes(is_base=True).cpu().numpy().astype("<f4")
            ids = self.rows.astype("<i4").tobytes()
            self._known = Probe(ids, self.rows.shape[1], base.tobytes(), *(one.tobytes() for one in exact))

    def _passes(self, *, is_base: bool) -> torch.Tensor:
        """Return log-probs, float32 (1 or 2, N)."""
        model, trains = self.model, self.model.training
        model.eval()
        try:
            with torch.no_grad():
                merge = merged_layers(model) if self.merged else contextlib.nullcontext()
                with self.autocast(), merge:
                    passes = [self._logprobs(model)]
                self._has_exact &= may_be_cast(model)
                if self._has_exact:
                    passes += self._exact()
        finally:
            model.train(trains)
        return torch.stack(passes)

    def _exact(self) -> list[torch.Tensor]:
        """Return the pass in float32 arithmetic; nothing for a model whose code reads weights of other modules."""
        inner = self.model.get_base_model()  # accelerate may have given the outer one autocast
        try:
            with in_float32(inner):
                return [self._logprobs(inner)]
        except RuntimeError as error:
            if "dtype" not in str(error) and "type" not in str(error):
                raise
            logger.warning("the probe of a swap is measured in the model's own format alone: %s", error)
            self._has_exact = False
            return []

    def _logprobs(self, model: Any) -> torch.Tensor:
        rows = torch.from_numpy(self.rows).long().to(self.model.device)
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        found = [  # one by one: log-probs of a whole vocabulary take much memory
            of_row.float().log_softmax(dim=-1).gather(1, row[1:, None])[:, 0]
            for row, of_row in zip(rows, logits, strict=True)
        ]
        return torch.cat(found)


def may_be_cast(model: Any) -> bool:
    """Return whether a float32 pass of the model differs from its own, and can be made: not where ranks share its layers."""
    return any(parameter.dtype in _HALVES for parameter in model.parameters()) and not any(
        isinstance(module, FSDPModule) for module in model.modules()
    )


@contextmanager
def in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Let the model compute in float32. Each module's own 16-bit parameters are cast while it computes."""
    held: dict[torch.nn.Module, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}

    def cast(module: torch.nn.Module, *_: Any) -> None:
        held[module] = [(one, one.data) for one in module.parameters(recurse=False) if one.dtype in _HALVES]
        for parameter, _ in held[module]:
            parameter.data = parameter.data.float()

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for parameter, data in held.pop(module, ()):
            parameter.data = data

    with _around_forward(model, cast, restore, lambda module: any(True for _ in module.parameters(recurse=False))):
        yield


@contextmanager
def merged_layers(model: torch.nn.Module) -> Iterator[None]:
    """Let the model compute with merged weights, rounded to the base's dtype, one layer at a time, in place of the adapter,
    unless that is disabled."""
    held: dict[torch.nn.Module, torch.Tensor] = {}

    def merge(module: Any, *_: Any) -> None:
        weight = module.base_layer.weight
        held[module] = weight.data
        weight.data = merged_weight(module).to(weight.dtype)
        module._disable_adapters = True

    def restore(module: Any, *_: Any) -> None:
        module._disable_adapters = False
        module.base_layer.weight.data = held.pop(module)

    with _around_forward(
        model, merge, restore, lambda module: isinstance(module, Linear) and not module.disable_adapters
    ):
        yield


@contextmanager
def _around_forward(
    model: torch.nn.Module,
    before: Callable[..., None],
    after: Callable[..., None],
    applies: Callable[[torch.nn.Module], bool],
) -> Iterator[None]:
    with ExitStack() as hooks:
        for module in filter(applies, model.modules()):
            hooks.enter_context(_removed(module.register_forward_pre_hook(before)))
            hooks.enter_context(_removed(module.register_forward_hook(after, always_call=True)))
        yield


@contextmanager
def _removed(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()
