"""Whole runs of a benchmark's task: the processes of a run, the pair in it, and accuracy at its checkpoints.

Guarantee: on a CPU an engine has one thread, on core 0, and the trainer's processes have one thread each, on both cores. On a GPU
both sides share it, in bfloat16, with an adapter that the engine serves unless the case says otherwise. All processes of a run
end with it.
"""

import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engine_tokens import EngineTokens
from benchmarks.tasks import TASKS
from benchmarks.watch import Watch
from producer.engine.configuration import ON_CPU
from protocol.config.loader import load_config
from protocol.runtime import json_lines
from protocol.wire.codec import decode
from protocol.wire.messages import Group
from replay.journal.reader import JournalReader
from tests.integration.vllm_server import wait_until_healthy
from tests.unit.protocol.channel_harness import reserve_port

ENGINE_CORE = "0"
CHECKPOINTS = 10
"""Checkpoints of a run."""

BEGAN = "began"
"""The file in which TRL's trainer notes the Unix time of its first request."""

WORTH = 0.9
"""The accuracy to which costs are compared, as a share of the best that any run reached, where a task names none."""

_END_S, _STOP_S = 7200.0, 60.0
_ON_CPU = {
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": ENGINE_CORE,
    "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
_ON_GPU = ["model.dtype=bfloat16", "swap.mode=adapter", "pipeline.gpu=shared", "engine.enforce_eager=false"]
_SERVERS_SHARE = "0.7"  # of the GPU's memory


class RunCase(Protocol):
    """What is run. `settings` are the values that differ from those of the task's example."""

    @property
    def task(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    @property
    def settings(self) -> list[str]: ...


class Run:
    """The processes of a case, which end with `stack`, and the `tokens` of its engine. `on_gpu`: on the first GPU that is
    visible."""

    def __init__(self, case: RunCase, stack: ExitStack, watch: Watch, *, on_gpu: bool = False) -> None:
        self.case, self.stack, self._watch, self._on_gpu = case, stack, watch, on_gpu
        self.tokens = stack.enter_context(EngineTokens(case.folder))
        self.settings = (_ON_GPU if on_gpu else []) + case.settings
        self.config = load_config(TASKS[case.task].config, self.settings)

    def start(self, side: str, module: str, words: list[str]) -> "subprocess.Popen[bytes]":
        """Start a process of the side `engine` or `trainer`, whose output goes to a file."""
        bound = ["taskset", "-c", ENGINE_CORE] if side == "engine" and not self._on_gpu else []
        changes = ({} if self._on_gpu else _ON_CPU) | {
            "TOKENIZERS_PARALLELISM": "false", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with (self.case.folder / f"{module.partition('.')[0]}.log").open("wb") as log:
            process = subprocess.Popen(
                [*bound, sys.executable, "-m", module, *words], env=os.environ | changes, stdout=log, stderr=log
            )
        self.stack.callback(_end, process)
        self._watch.add(side, process.pid)
        return process

    def serve(self, model: Path, *flags: str) -> str:
        """Start a vLLM server of a model on the engine's core or the GPU, wait for it, and return its address."""
        port = reserve_port(self.stack)
        on_cpu = (
            *("--enforce-eager", "--distributed-executor-backend", ON_CPU["distributed_executor_backend"]),
            *("--block-size", str(ON_CPU["block_size"])),
            "--no-enable-chunked-prefill",  # a prompt in two parts, with a seed, ends vLLM's engine on a CPU
        )
        words = [
            *("--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", self.config.model.dtype),
            *("--max-model-len", str(self.config.engine["max_model_len"])),
            *(("--gpu-memory-utilization", _SERVERS_SHARE) if self._on_gpu else on_cpu),
            *flags,
        ]  # fmt: skip
        server = self.start("engine", "vllm.entrypoints.openai.api_server", words)
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server, self.case.folder / "vllm.log")
        return url

    def train_pair(self, url: str | None = None, more: Sequence[str] = (), most_tokens: int = 0) -> None:
        """Run the pair to its end, or until `most_tokens` are sampled, with an engine of its own, or with the server at `url`,
        and with `more` settings."""
        case, sockets = self.case, self.stack.enter_context(tempfile.TemporaryDirectory(prefix="pair-"))
        changes = [*self.settings, f"run_dir={case.folder}", f"transport.endpoint=ipc://{sockets}/control.ipc"]
        changes += ["evaluation=null", "observability.progress=false", *more]
        if url is not None:
            adapters = f"engine_server.adapter_dir={sockets}/adapters"
            changes += ["engine={}", "swap.mode=adapter", "pipeline.gpu=own", f"engine_server.url={url}", adapters]
        words = ["--gpu", "0" if self._on_gpu else "cpu", "--config", TASKS[case.task].config]
        words += [word for change in changes for word in ("--set", change)]
        producer = self.start("engine" if url is None else "trainer", "producer.app.cli", words)
        trainer = self.start("trainer", "consumer.app.cli", words)
        deadline = time.monotonic() + _END_S
        while trainer.poll() is None and producer.poll() in (None, 0) and time.monotonic() < deadline:
            if most_tokens and self.tokens.newest >= most_tokens:
                return
            time.sleep(0.1)


def steps(case: RunCase, wanted: int) -> list[dict[str, Any]]:
    """Return the lines of a run's steps. Exit with an error if there are fewer than `wanted`."""
    lines = json_lines.read(case.folder / "steps.jsonl")
    if len(lines) < wanted:
        sys.exit(f"{case.folder}: {len(lines)} of {wanted} steps: see its logs")
    return lines


def scores(case: RunCase, checkpoints: str = "checkpoints") -> Iterator[tuple[int, float]]:
    """Yield the step of each checkpoint and its accuracy, beginning with the untrained model, of step 0."""
    yield 0, _untrained(case.task)
    folders = (case.folder / checkpoints).glob("checkpoint-*")
    for number, folder in sorted((int(folder.name.rpartition("-")[2]), folder) for folder in folders):
        yield number, TASKS[case.task].accuracy(folder)


@functools.cache
def _untrained(task: str) -> float:
    return TASKS[task].accuracy(None)


def first_request(folder: Path) -> float:
    """Return the Unix time at which the pair began to sample its first group."""
    with closing(JournalReader(folder / "journal.sqlite")) as journal:
        groups = [(row.accepted_at, decode(journal.body(row) or b"", Group)) for row in journal.rows()]
    return min(at - group.generation_s - group.reward_s for at, group in groups)


def journaled(folder: Path) -> int:
    """Return the tokens of all completions that arrived."""
    with closing(JournalReader(folder / "journal.sqlite")) as journal:
        return sum(row.num_tokens for row in journal.rows())


def cost_to(goal: float, accuracies: Sequence[float], costs: Sequence[float]) -> float | None:
    """Return the cost at which accuracy reaches `goal`, in proportion between two checkpoints; None if it does not."""
    points = list(zip(accuracies, costs, strict=True))
    if points[0][0] >= goal:
        return points[0][1]
    for (low, before), (high, after) in itertools.pairwise(points):
        if high >= goal:
            return before + (after - before) * (goal - low) / (high - low)
    return None


def goals_of(task: str, reached: Sequence[float]) -> tuple[float, ...]:
    """Return the accuracies to which costs of a task are compared. `reached` are those at the ends of its runs."""
    return TASKS[task].goals or (WORTH * max(reached),)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
