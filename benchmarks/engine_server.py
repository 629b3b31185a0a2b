"""A vLLM server beside the engine in process: `python -m benchmarks.engine_server`, or `make bench-engine-server`.

Guarantee: both engines are real, have the same model, flags and adapter, and take turns burst by burst; who goes first changes
every time, so that whatever else the machine does falls on both. The server is a process of its own, as `vllm serve` starts it.
On a CPU an engine in process multiplies adapters with code of Slipstream, where a plain vLLM has its own; `--vllm-lora` has it
use vLLM's, too.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from benchmarks.swap_modes import GROUP, MODELS, RANK, build, run_config
from producer.engine.adapter_worker import LoadingWorker
from producer.engine.configuration import ON_CPU
from producer.interfaces import Adapter, Engine
from protocol.config.run import RunConfig
from protocol.wire.messages import Sampling

_START_S = 600.0


class VllmLoading(LoadingWorker):
    """Loads as the product does, and leaves the computation to vLLM."""

    def loading_start(self) -> None:
        with mock.patch("producer.engine.adapter_worker.ByAdapter"):
            super().loading_start()


class Arm:
    """One engine under one adapter after the other."""

    def __init__(self, name: str, engine: Engine, folder: Path, processes: set[psutil.Process]) -> None:
        self.name = name
        self.swaps_ms: list[float] = []
        self._engine = engine
        self._processes = processes
        self._folder = folder
        self._adapter: Adapter | None = None
        self._number = 0

    async def swap(self) -> None:
        """To the other adapter, with a probe."""
        former, self._number = self._adapter, self._number + 1
        path = self._folder / f"adapter-{1 + self._number % 2}"
        adapter = Adapter(self._number, f"v{self._number}", self._number, path)
        started = time.perf_counter()
        await self._engine.weights.load(adapter)
        await self._engine.weights.verify(adapter, [2, 3, 4, 5, 6, 7, 8, 9])
        self._engine.weights.activate(adapter)
        self.swaps_ms.append((time.perf_counter() - started) * 1e3)
        self._adapter = adapter
        if former is not None:
            await self._engine.weights.discard(former)

    async def burst(self, num_requests: int, length: int) -> tuple[float, float]:
        """Tokens per second, and per second of CPU time of this process and the engine's."""
        started, cpu_started = time.perf_counter(), self._cpu_s()
        groups = await asyncio.gather(
            *(self._group([2 + n % 97, 3 + n % 89, 5, 7], length) for n in range(num_requests // GROUP))
        )
        count = sum(groups)
        return count / (time.perf_counter() - started), count / (self._cpu_s() - cpu_started)

    def _cpu_s(self) -> float:
        return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in self._processes)

    async def _group(self, prompt: list[int], length: int) -> int:
        assert self._adapter is not None
        completions = await self._engine.generate(prompt, Sampling(GROUP, length, 1.0), self._adapter, asyncio.Event())
        return sum(len(completion.token_ids) for completion in completions)


def family(pid: int) -> set[psutil.Process]:
    """A process and everything it started."""
    return {psutil.Process(pid), *psutil.Process(pid).children(recursive=True)}


@contextlib.contextmanager
def server(config: RunConfig, folder: Path) -> Iterator[tuple[str, int]]:
    """Its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine, loras = config.engine, str(config.max_loras)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model.path),
        *("--dtype", config.model.dtype, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", str(engine["max_model_len"]), "--max-num-seqs", str(engine["max_num_seqs"])),
        *("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", loras),
        *("--logprobs-mode", "processed_logprobs"),
        *(
            ()
            if torch.cuda.is_available()
            else ("--distributed-executor-backend", ON_CPU["distributed_executor_backend"])
        ),
    ]
    changes = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | changes)
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(60)


@contextlib.asynccontextmanager
async def arms(folder: Path, dtype: str, *, vllm_lora: bool) -> AsyncIterator[list[Arm]]:
    from producer.engine import configuration as arguments
    from producer.engine.engine import VllmEngine
    from producer.plugins.engine_server.engine import server_engine

    config = run_config(folder, "adapter", dtype)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))  # as VllmEngine does
    with server(config, folder) as (url, pid):
        section = {"url": url, "adapter_dir": str(folder / "shared"), "answer_timeout_s": 300.0}
        section |= {"max_requests": config.engine["max_num_seqs"]}
        remote = RunConfig.model_validate(
            config.model_dump(exclude_unset=True) | {"engine": {}, "engine_server": section}
        )
        own = arguments.own_arguments
        extension = {"worker_extension_cls": "benchmarks.engine_server.VllmLoading"} if vllm_lora else {}
        with mock.patch("producer.engine.configuration.own_arguments", lambda *given: own(*given) | extension):
            local = VllmEngine(config, 0)
        try:
            await local.warm_up()
            async with server_engine(remote) as engine, asyncio.timeout(_START_S):
                await engine.warm_up()
                theirs = family(pid)
                ours = family(os.getpid()) - theirs - {psutil.Process()}  # whose own time is counted for both
                yield [Arm("in process", local, folder, ours), Arm("server", engine, folder, theirs)]
        finally:
            local.shutdown()


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    async with arms(folder, arguments.dtype, vllm_lora=arguments.vllm_lora) as both:
        for num_requests in arguments.loads:
            speeds: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in both}
            for index in range(arguments.rounds + 1):
                for arm in both if index % 2 else reversed(both):
                    await arm.swap()
                    speed = await arm.burst(num_requests, arguments.length)
                    if index:  # the first round warms up
                        speeds[arm.name].append(speed)
            pairs = list(zip(speeds["server"], speeds["in process"], strict=True))
            result[f"{num_requests} requests"] = {
                "server_beside_in_process": {
                    unit: statistics.quantiles((mine[place] / theirs[place] for mine, theirs in pairs), n=4)
                    for place, unit in enumerate(("wall", "cpu"))
                }
            } | {
                name: {
                    "tokens_per_s": statistics.median(wall for wall, _ in values),
                    "tokens_per_cpu_s": statistics.median(cpu for _, cpu in values),
                }
                for name, values in speeds.items()
            }
        return result | {"swap_ms": {arm.name: statistics.median(arm.swaps_ms[2:]) for arm in both}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Tokens per second and swaps of a vLLM server beside the engine in process."
    )
    parser.add_argument("--model", choices=MODELS, default="20M")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--loads", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--length", type=int, default=64, help="tokens of a completion at most")
    parser.add_argument("--vllm-lora", action="store_true", help="in process with vLLM's own code for adapters, too")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/engine-server.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), MODELS[arguments.model])
        found = asyncio.run(measure(Path(folder), arguments))

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
