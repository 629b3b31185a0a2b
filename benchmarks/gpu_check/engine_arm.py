"""One arm of the engine alone: an engine with so many groups in flight, and what its steps were.

Guarantee: the model has the shape of SmolLM2-135M (on a CPU a small one), and weights with which each of two tokens has a known
chance at every position. So the end of a completion is sampled, and lengths are the same in every arm and on every machine.
Steps are counted by vLLM, after those in which the engine fills up.
"""

import asyncio
import itertools
import math
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_check.model import RANK, save_with_policy
from benchmarks.gpu_check.place import Findings, NotRunError, Place
from benchmarks.gpu_check.step import size_of
from benchmarks.trainer_step import SHAPES, Side
from examples.folders import build_once
from producer.engine_contract import Adapter, EngineLoad, most_groups
from producer.rollouts.admission import Admission
from protocol.config.run import RunConfig
from protocol.wire.messages import Sampling

GROUP = 8
_VLLMS = "benchmarks.gpu_check.vllm_metadata_worker.VllmMetadataWorker"
_PROMPT, _SHARED = 64, 16  # tokens of a prompt, and how many of them all prompts share
_SHAPE: dict[str, Any] = SHAPES["SmolLM2-135M"]["model"]
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 1, "vocab_size": 256}  # fmt: skip
_EOS, _SOON = 1, 2
_CHANCES = {_EOS: 1 / 168, _SOON: 1 / 13}
_LARGE = 1024.0  # of one number of the residual stream, beside which all others are small
_LOOK_EVERY_S = 0.01
_LEASES = 64  # groups that the trainer's staleness of 1 and steps of 32 groups allow at once


class Load(NamedTuple):
    """Completions of at most `longest` tokens, which one of `ends` ends. Of the steps, `ramp` fill the engine, `steps` count."""

    longest: int
    ends: tuple[int, ...]
    ramp: int
    steps: int


_LOADS = (Load(32, (_SOON,), 40, 150), Load(512, (), 350, 250))


def run(
    place: Place,
    mode: str,
    engine: dict[str, Any],
    groups: tuple[int, ...],
    own_metadata: bool = True,
    beside: bool = False,
    mps: bool = False,
) -> Findings:
    """Measure an engine with `groups` in flight; 0 stands for what the producer's admission lets in. LoRA metadata is vLLM's
    unless `own_metadata`. With `beside` a trainer works on the same GPU, and kernels of both run side by side under `mps`."""
    folder = place.shared / f"smollm2-{place.device}"
    build_once(folder, Path(__file__).read_bytes(), lambda partial: build(partial, on_cpu=place.on_cpu))
    config = config_of(folder, place, mode, engine)
    with ExitStack() as stack, asyncio.Runner() as runner:
        if mps:
            stack.enter_context(_mps())
        trained = stack.enter_context(_busy_trainer(place)) if beside else None
        began = time.monotonic()
        bench = runner.run(_Bench.started(config, folder / "adapter", own_metadata=own_metadata))
        stack.callback(bench.close)
        yield {"what": "start", "seconds": time.monotonic() - began}
        for number, load in itertools.product(groups, _LOADS):
            if place.on_cpu:
                number, load = min(number, 4), load._replace(ramp=10, steps=20)
            shown = f"{number} groups" if number else "admission"
            yield {"what": f"{shown}, at most {load.longest} tokens"} | runner.run(bench.measure(number, load, trained))


def config_of(folder: Path, place: Place, mode: str, engine: dict[str, Any]) -> RunConfig:
    """Return the configuration of an arm's engine."""
    ours = {"max_model_len": 1024, "cudagraph_metrics": True, "enforce_eager": place.on_cpu}
    return RunConfig.model_validate(
        {
            "run_dir": str(place.folder / "run"),
            "model": {"path": str(folder / "model"), "dtype": place.dtype},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"function": "unused:reward"}]},
            "sampling": {"num_generations": GROUP},
            "swap": {"mode": mode},
            "lora": {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"},
            "engine": ours | ({} if place.on_cpu else {"gpu_memory_utilization": 0.5}) | engine,
        }
    )


def build(folder: Path, *, on_cpu: bool) -> None:
    """Write the model: at every position each token of `_CHANCES` has its chance, and all other tokens share the rest equally."""
    torch.manual_seed(0)
    shape = _SHAPE | (_SMALL if on_cpu else {})
    tokens = {"eos_token_id": _EOS, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    shape = shape | tokens | {"max_position_embeddings": 1024}
    config = AutoConfig.for_model(**{name: value for name, value in shape.items() if name != "dtype"})
    with torch.device("cpu" if on_cpu else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rest = (1 - sum(_CHANCES.values())) / (config.vocab_size - len(_CHANCES))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = _LARGE
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight.zero_()
        for token, chance in _CHANCES.items():  # the last norm makes sqrt(hidden size) of the large number
            model.lm_head.weight[token, 0] = math.log(chance / rest) / math.sqrt(config.hidden_size)
    save_with_policy(model, folder)


def numbers(before: EngineLoad, after: EngineLoad, seconds: float) -> dict[str, Any]:
    """Return what the steps between two loads were. Each sequence of a step samples a token."""
    totals: Any = zip(before.steps, after.steps, strict=True)
    steps, tokens, sequences, with_graph = (late - early for early, late in totals)
    return {
        "tokens_per_s": sequences / seconds,
        "steps_per_s": steps / seconds,
        "sequences_a_step": sequences / steps,
        "tokens_a_step": tokens / steps,
        "share_with_graph": with_graph / steps,
        "preemptions": after.preemptions - before.preemptions,
    }


class _Bench:
    """An engine with a policy."""

    def __init__(self, engine: Any, adapter: Adapter) -> None:
        self._engine, self._adapter = engine, adapter
        self._draw = random.Random(0)

    @classmethod
    async def started(cls, config: RunConfig, policy: Path, *, own_metadata: bool) -> "_Bench":
        from producer.engine import engine as engine_module

        if not own_metadata:
            build_config = engine_module.build_vllm_config

            def with_vllms(config: RunConfig, folder: Path, num_gpus: int) -> Any:
                made = build_config(config, folder, num_gpus)
                made.parallel_config.worker_extension_cls = _VLLMS
                return made

            engine_module.build_vllm_config = with_vllms
        engine = engine_module.VllmEngine(config, 0)
        await engine.warm_up()
        adapter = Adapter(1, "v1", 1, policy)
        await engine.weights.load(adapter)
        engine.weights.activate(adapter)
        return cls(engine, adapter)

    @property
    def _load(self) -> Any:
        return self._engine.current_load()

    async def measure(self, num_groups: int, load: Load, trained: Callable[[], int] | None) -> dict[str, Any]:
        """Keep the engine full, and return what its steps were once it was. `trained` counts the steps of a trainer."""
        sampling = Sampling(GROUP, load.longest, 1.0, stop_token_ids=load.ends)
        admission = None if num_groups else self._admission()
        callers = [asyncio.create_task(self._sample(admission, sampling)) for _ in range(num_groups or _LEASES)]
        try:
            await self._passed(load.ramp, callers)
            before, began, trained_before = self._load, time.monotonic(), trained() if trained else 0
            await self._passed(load.steps, callers)
            seconds = time.monotonic() - began
            beside = {"trainer_steps_per_s": (trained() - trained_before) / seconds} if trained else {}
            return numbers(before, self._load, seconds) | beside
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)

    def _admission(self) -> Admission:
        ceiling = most_groups(self._engine.capabilities.max_num_seqs, GROUP)
        admission = Admission(ceiling, GROUP, self._engine.current_load)
        self._engine.watch_load(admission.note_load)
        return admission

    async def _sample(self, admission: Admission | None, sampling: Sampling) -> None:
        while True:
            async with AsyncExitStack() as stack:
                if admission is not None:
                    place = await stack.enter_async_context(admission.place())
                    await stack.enter_async_context(place.use(GROUP))
                own = [self._draw.randrange(3, self._engine.capabilities.vocab_size) for _ in range(_PROMPT - _SHARED)]
                await self._engine.generate([3] * _SHARED + own, sampling, self._adapter)

    async def _passed(self, steps: int, callers: list[asyncio.Task[None]]) -> None:
        """Wait for so many steps more. Raise what a caller raised."""
        until = self._load.steps.number + steps
        while self._load.steps.number < until:
            if ended := next((caller for caller in callers if caller.done()), None):
                ended.result()
            await asyncio.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        self._engine.shutdown()


@contextmanager
def _busy_trainer(place: Place) -> Iterator[Callable[[], int]]:
    """Yield what counts the steps that a trainer has taken, one after the other."""
    size = size_of(place, None) | ({} if place.on_cpu else {"model": _SHAPE | {"dtype": place.dtype}})
    (folder := place.folder / "trainer").mkdir()
    side, ending = Side("ours", size, folder, 1), threading.Event()
    steps: list[dict[str, Any]] = []

    def work() -> None:
        while not ending.is_set():
            steps.append(side.step())

    def taken() -> int:
        if not thread.is_alive():
            raise RuntimeError("the trainer beside the engine has ended")
        return len(steps)

    side.answer()
    side.step()  # the first one compiles
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield taken
    finally:
        ending.set()
        thread.join()
        side.close()


@contextmanager
def _mps() -> Iterator[None]:
    """Let processes that start meanwhile work side by side on the GPU."""
    if (control := shutil.which("nvidia-cuda-mps-control")) is None:
        raise NotRunError("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, check=False)
