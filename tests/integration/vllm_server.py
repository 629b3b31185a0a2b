"""A real `vllm serve` as somebody else's process, started, killed and started again at the same port."""

import os
import signal
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil

from producer.engine.configuration import ON_CPU
from tests.integration.pair import START_S
from tests.integration.warm import WarmProcess
from tests.unit.protocol.channel_harness import reserve_port


class VllmServer:
    """Of `model` on the CPU, for adapters of this rank at most."""

    def __init__(
        self, model: Path, folder: Path, stack: ExitStack, dtype: str = "float32", max_len: int = 128, rank: int = 8
    ) -> None:
        self.port = reserve_port(stack)
        stack.callback(self.kill)
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._arguments = [
            *("--model", str(model), "--dtype", dtype, "--host", "127.0.0.1", "--port", str(self.port)),
            *(
                "--max-model-len",
                str(max_len),
                "--max-num-seqs",
                "32",
                "--enforce-eager",
                "--num-gpu-blocks-override",
                "64",
            ),
            *("--distributed-executor-backend", ON_CPU["distributed_executor_backend"]),  # one process less
            *(
                "--enable-lora",
                "--max-loras",
                "4",
                "--max-lora-rank",
                str(rank),
                "--logprobs-mode",
                "processed_logprobs",
            ),
        ]
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Does not wait for it."""
        self._starts += 1
        changes = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        log = self._folder / f"server-{self._starts}.log"
        self._process = WarmProcess("vllm.entrypoints.openai.api_server", self._arguments, log, os.environ | changes)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)

    @property
    def output(self) -> str:
        return (self._folder / f"server-{self._starts}.log").read_text(errors="replace")[-5000:]

    def kill(self) -> None:
        """With its engine core, as a machine that goes away."""
        if self._process.poll() is None:
            family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
            os.killpg(self._process.pid, signal.SIGKILL)
            psutil.wait_procs(family, timeout=30)
            self._process.wait(30)
