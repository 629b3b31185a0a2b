"""A real `vllm serve` as somebody else's process, started, killed and started again at the same port."""

import os
import signal
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil

from campaigns.chaos.fleet import Daemon
from producer.engine.configuration import ON_CPU
from tests.integration.pair import START_S
from tests.integration.warm import WarmProcess
from tests.unit.protocol.channel_harness import reserve_port


def wait_until_healthy(url: str, process: "WarmProcess | Daemon | subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server answers. Fail if its process ends first, or after `START_S`."""
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-5000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-5000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)


class VllmServer:
    """Of `model` on the CPU, for adapters of this rank at most, with more `flags`."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        stack: ExitStack,
        dtype: str = "float32",
        max_len: int = 128,
        rank: int = 8,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.model = model
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
                "--enable-prompt-tokens-details",
            ),
            *flags,
        ]
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Does not wait for it."""
        self._starts += 1
        changes = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        module, environment = "vllm.entrypoints.openai.api_server", os.environ | changes
        self._process = WarmProcess(module, self._arguments, self._log, environment)

    def wait_until_ready(self) -> None:
        wait_until_healthy(self.url, self._process, self._log)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")[-5000:]

    @property
    def _log(self) -> Path:
        return self._folder / f"server-{self._starts}.log"

    def kill(self) -> None:
        """With its engine core, as a machine that goes away."""
        if self._process.poll() is None:
            family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
            os.killpg(self._process.pid, signal.SIGKILL)
            psutil.wait_procs(family, timeout=30)
            self._process.wait(30)
