"""Commands on a machine with the stand-in GPU, for tests: forks of the process that has it."""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.conftest import zygote


class Command:
    """A running command, whose output goes to a file.

    Args:
        gpu_bytes: of the GPU; None: as many as an H100 has.
        machine: eight digits, in hexadecimal, of the UUIDs of its GPUs.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], log: Path, *, gpu_bytes: int | None = None, machine: str = "0" * 8
    ) -> None:
        log.touch()
        self._log = log
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "NVML_MACHINE": machine}
        if gpu_bytes is not None:
            environment["STAND_IN_GPU_BYTES"] = str(gpu_bytes)
        del environment["PATH"]  # that of the zygote has nvidia-smi
        environment.pop("LD_LIBRARY_PATH", None)
        self._process = zygote().start(
            [module, *arguments], log=log, module=module, environment=environment, cwd=os.getcwd(), network=None
        )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def wait_for(self, pattern: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.output):
            assert self.poll() is None, self.output[-3000:]
            assert time.monotonic() < deadline, self.output[-3000:]
            time.sleep(0.1)

    def close(self) -> None:
        if self.poll() is None:
            self._process.send(signal.SIGKILL)
            self._process.wait(10)
