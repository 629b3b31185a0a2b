"""How trainer and producer divide the memory of one GPU (`pipeline.gpu: shared`).

Guarantee: both shares, two CUDA contexts and a rest for what nobody counts fit into the GPU together, or a `ConfigError` says
what to change. A share that the user names (`engine.gpu_memory_utilization`) is taken as it is, and the trainer gets what it
leaves.
"""

import math
from dataclasses import dataclass

from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.gpu.needs import GIB, EngineNeeds, TrainerNeeds

CONTEXT = 3 * GIB // 4  # of a process, before its first tensor: CUDA itself and its kernels
_MOST = 0.9  # of the GPU: what an engine takes that has it for itself
_UNCOUNTED = 0.03  # of the GPU: what the driver keeps, and what NVML counts and CUDA does not
_KEY = "engine.gpu_memory_utilization"
_SMALLER = (
    "model.quantization: nf4, engine.quantization, a shorter engine.max_model_len or sampling.max_completion_length, "
    "pipeline.gpu: turns, in which only one of them has to fit, or a GPU each (pipeline.gpu: own)"
)


@dataclass(frozen=True)
class Shares:
    """Of the memory of one GPU, in bytes. A CUDA context comes to each."""

    total: int
    trainer: int
    utilization: float  # of `total`: what vLLM is told
    is_chosen: bool  # by the user
    needs: TrainerNeeds
    engine: EngineNeeds

    @property
    def producer(self) -> int:
        return int(self.utilization * self.total)

    def in_words(self) -> str:
        needs, why = self.needs, f"as {_KEY} says" if self.is_chosen else f"{_KEY}, computed"
        smaller = " and will be cut smaller" if needs.wanted > self.trainer else ""
        return (
            f"of {gib(self.total)} the trainer may take {gib(self.trainer)} ({_kept(needs)}; a pass of {needs.tokens} tokens "
            f"takes {gib(needs.passes)}{smaller}) and the producer {gib(self.producer)} ({self.utilization:g}, {why})"
        )


def shares_of(config: RunConfig, total: int, needs: TrainerNeeds, engine: EngineNeeds) -> Shares:
    """
    Args:
        total: bytes of the GPU.

    Raises:
        ConfigError: the two do not fit.
    """
    room = int(total * (1 - _UNCOUNTED)) - 2 * CONTEXT
    chosen = config.engine.get("gpu_memory_utilization")
    if chosen is not None:
        return _around(_number(chosen), total, room, needs, engine)
    if needs.least + engine.least > room:
        raise ConfigError(
            f"pipeline.gpu: shared: the GPU has {gib(total)}, of which {gib(max(0, room))} are left beside CUDA, and both need "
            f"{gib(needs.least + engine.least)} at least: {_least(needs)}; the engine {gib(engine.least)} (weights "
            f"{gib(engine.weights)}, LoRA slots {gib(engine.adapters)}, KV cache of one group {gib(engine.cache)}). Take "
            f"{_SMALLER}"
        )
    producer = max(engine.least, min(int(_MOST * total), room - needs.wanted))
    utilization = math.floor(1000 * producer / total) / 1000
    return Shares(total, room - int(utilization * total), utilization, False, needs, engine)


def _around(utilization: float, total: int, room: int, needs: TrainerNeeds, engine: EngineNeeds) -> Shares:
    trainer = room - int(utilization * total)
    if trainer < needs.least:
        highest = math.floor(100 * (room - needs.least) / total) / 100
        fix = f"lower it to at most {highest:g}, or leave it out" if highest > 0 else f"take {_SMALLER}"
        raise ConfigError(
            f"{_KEY}: {utilization:g} of {gib(total)} leaves {gib(max(0, trainer))} to the trainer, which shares the GPU "
            f"(pipeline.gpu: shared), and that is too little: {_least(needs)}; {fix}"
        )
    return Shares(total, trainer, utilization, True, needs, engine)


def _number(value: object) -> float:
    """As YAML or `--set` may say it."""
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        raise ConfigError(f"{_KEY}: expected a share above 0 and at most 1, got {value!r}")
    return found


def _least(needs: TrainerNeeds) -> str:
    return (
        f"the trainer needs {gib(needs.least)} ({_kept(needs)}, a pass of {needs.least_tokens} tokens "
        f"{gib(needs.least_passes)})"
    )


def _kept(needs: TrainerNeeds) -> str:
    return f"base {gib(needs.base)}, adapter with optimizer {gib(needs.adapter)}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
