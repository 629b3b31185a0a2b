"""Zygotes and the daemons that they fork.

Guarantee: a signal reaches the process it is meant for or nobody (it goes through a pidfd, not through a number that may
be another's by then); when a `Zygote` is closed, nothing that came from it is left.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

Role = Literal["trainer", "producer"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
_READY_S = 240.0
_FORK_S = 30.0


class Zygote:
    """
    Args:
        child: the module that it imports and that its children run; see `campaigns.chaos.zygote`.
        temporary: where the daemons find their $TMPDIR; one that is killed cannot clear up.
    """

    def __init__(self, child: str, log: Path, temporary: Path) -> None:
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "campaigns.chaos.zygote", child, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=os.environ | ENVIRONMENT | {"TMPDIR": str(temporary)},
                cwd=Path(__file__).parents[2],
                start_new_session=True,
                bufsize=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._listen(child, self._process.stdin, self._process.stdout)

    def _listen(self, child: str, requests: IO[bytes], reports: IO[bytes]) -> None:
        self._child = child
        self._requests, self._reports = requests, reports
        self._ids = 0
        self._pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._changed = threading.Condition()
        self._ready = self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        self._await(lambda: self._ready, _READY_S)

    def start(self, argv: list[str], *, log: Path, evidence: Path = Path(os.devnull), **options: Any) -> "Daemon":
        """Forks a daemon with this command line and these further fields of its request."""
        self._ids += 1
        number = self._ids
        request = {"id": number, "argv": argv, "log": str(log), "evidence": str(evidence)} | options
        self._requests.write((json.dumps(request) + "\n").encode())
        self._requests.flush()
        self._await(lambda: number in self._pids, _FORK_S)
        return Daemon(self, self._pids[number], log, evidence)

    def status(self, pid: int) -> int | None:
        """How a child ended (a negative signal number, or its exit code); None while it runs."""
        return self._statuses.get(pid)

    def close(self) -> None:
        """Children die with their zygote."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(30)
        self._reader.join(30)
        for stream in (self._requests, self._reports):
            stream.close()

    def _await(self, condition: Any, timeout_s: float) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: condition() or self._ended, timeout_s)
        if not done or not condition():
            raise AssertionError(f"the zygote of {self._child} {'has ended' if self._ended else 'did not answer'}")

    def _read(self) -> None:
        for line in self._reports:
            report = json.loads(line)
            with self._changed:
                if "ready" in report:
                    self._ready = True
                elif "started" in report:
                    self._statuses.pop(report["pid"], None)  # the number was another child's before
                    self._pids[report["started"]] = report["pid"]
                else:
                    self._statuses[report["ended"]] = report["status"]
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@contextlib.contextmanager
def zygotes(package: str, logs: Path, temporary: Path) -> Iterator[dict[Role, Zygote]]:
    """Of `package.trainer_child` and `package.producer_child`, until the context ends. They import side by side."""
    roles: tuple[Role, ...] = ("trainer", "producer")
    with contextlib.ExitStack() as stack:
        started = {role: Zygote(f"{package}.{role}_child", logs / f"zygote-{role}.log", temporary) for role in roles}
        for zygote in started.values():
            stack.callback(zygote.close)
        for zygote in started.values():
            zygote.wait_until_ready()
        yield started


class Daemon:
    """One process of a daemon."""

    def __init__(self, zygote: Zygote, pid: int, log: Path, evidence: Path) -> None:
        self._zygote = zygote
        self.pid = pid
        self.log = log
        self.evidence = evidence
        self.started_at = time.monotonic()
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None
        self.ended = False

    def poll(self) -> int | None:
        """Its exit code or negative signal number, once it has ended."""
        status = self._zygote.status(self.pid)
        if status is not None and not self.ended:
            self.ended = True
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
        return status

    def wait(self, timeout_s: float) -> int:
        """How it ended. Raises `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.log.name, timeout_s)
            time.sleep(0.02)
        return status

    def send(self, number: int) -> bool:
        """False if it has ended."""
        if self._pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def tail(self, num_bytes: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-num_bytes:] if self.log.exists() else ""
