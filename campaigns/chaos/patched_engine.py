"""A scripted engine whose own weights are exchanged, for a producer of `lora: null`.

Guarantee: map, patches, flip and proof are the product's, and so are the versions of tokens. A stand-in for vLLM's model has the
checkpoint's tensors as they are, and samples by chance. The weights that a policy gave are written down.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from campaigns.chaos.aims import Aim
from campaigns.chaos.evidence import digest_of_weights
from producer.engine.exchange_worker import ExchangeWorker
from producer.engine.patch_worker import Patcher
from producer.engine.weight_map import Checkpoint
from producer.engine.weights import MergedWeights
from producer.engine_contract import Adapter, AdapterRefusedError, Completion, Rows
from producer.link.fetch import _Download
from tests.scripted_engine import DEFAULT_PACE, ScriptedEngine

DTYPE = torch.bfloat16


def install(aim: Aim, note: Callable[..., None]) -> Callable[[Any, int], "PatchedEngine"]:
    """Set the points of a patch, and return what makes the engine."""
    aim.around(_Download, "_anchor", "anchor.begin", "anchor.fetched")
    aim.around(Patcher, "prepare", "prepare.begin", None)
    aim.around(Patcher, "_read", None, "prepare.read")
    aim.around(Patcher, "_make", None, "prepare.done")
    aim.around(Patcher, "flip", "flip.begin", "flip.done")
    aim.around(Patcher, "prove", None, "prove.begin")
    aim.around(Patcher, "_compare", None, "prove.done")
    return lambda config, num_gpus: PatchedEngine(config, random.Random(), aim.reach, note)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.int16).numpy().tobytes()


class Model(nn.Module):
    """Holds each tensor of a checkpoint as a parameter."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.by_name: dict[str, nn.Parameter] = {}
        for name, shape in checkpoint.shapes.items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=DTYPE), requires_grad=False)
            self.register_parameter(name.replace(".", "_"), parameter)
            self.by_name[name] = parameter
            self.load_weights([(name, checkpoint.flat(name).view(shape))])

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.by_name[name].data.copy_(tensor)


class Worker(ExchangeWorker):
    """A worker of the engine, and its core: it launches no steps, so requests get all their tokens at their end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = Model(Checkpoint(folder, DTYPE))

    def make_weights(self) -> Patcher:
        return Patcher(self.model, self._folder, DTYPE)

    def execute_model(self, step: Any) -> NoReturn:
        raise AssertionError("no step is launched here")

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self, method)(*arguments)]

    async def verify(self, rows: Rows, lora: None, salt: str, *, is_base: bool) -> NoReturn:
        raise AdapterRefusedError("this engine computes nothing with its weights")


class PatchedEngine(ScriptedEngine):
    def __init__(
        self, config: Any, chance: random.Random, reach: Callable[[str], None], note: Callable[..., None]
    ) -> None:
        super().__init__(config, DEFAULT_PACE, chance, reach)
        self.capabilities = replace(self.capabilities, holds_versions=False)
        worker = Worker(self.capabilities.tokenizer_folder)
        self.exchanged = MergedWeights(worker)  # type: ignore[arg-type]
        self.weights: Any = self.exchanged
        activate = self.exchanged.activate

        def noted(adapter: Adapter) -> None:
            tensors = ((name, bytes_of(each)) for name, each in worker.model.by_name.items())
            note("weights", policy=adapter.name.split("-")[1], weights=digest_of_weights(tensors))
            activate(adapter)

        self.exchanged.activate = noted  # type: ignore[method-assign]

    async def warm_up(self) -> None:
        await self.exchanged.start()

    async def generate(self, prompt_ids: Any, sampling: Any, adapter: Any, cut: Any) -> list[Completion]:
        def sample(*_: Any) -> Any:
            return super(PatchedEngine, self).generate(prompt_ids, sampling, adapter, cut)

        completions, request = await self.exchanged.sample(sample, adapter)
        return [
            replace(each, token_versions=request.token_versions(index, len(each.token_ids)))
            for index, each in enumerate(completions)
        ]
