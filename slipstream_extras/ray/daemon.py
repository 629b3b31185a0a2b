"""The Ray actor of one command: it starts it, watches it, starts it again and stops it.

Guarantee: the command ends with the actor, however that ends (`protocol.runtime.child`); what a new start cannot cure stays
down with its message (module `exits`). A trainer is started only when no other one holds the journal. Keys are in a
scratch folder of the actor, readable by its owner alone, and are gone with it.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protocol.errors import ExitCode
from protocol.runtime.child import KeptProcess
from protocol.runtime.files import ignore_disk_full
from protocol.runtime.json_lines import older, read_end
from protocol.runtime.metrics import Status
from protocol.runtime.processes import descendants, exit_text
from protocol.runtime.scratch import private, scratch_folder
from protocol.runtime.supervisor import restart
from slipstream.run_reader import RunReader
from slipstream.status.daemons import ask, find_daemons
from slipstream_extras.ray.plan import TRAINER, DaemonReport, Phase, Plan, daemon_command, namespace

MAX_BYTES = 16 * 2**20
_LONGEST_MESSAGE = 2000


class Output:
    """`path` is made, with its folder, for its owner alone."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path
        self._max_bytes = max_bytes
        self._begin = self._size

    @property
    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def opened(self) -> int:
        """A descriptor for a new process, whose last words begin here."""
        file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._begin = self._size
        return file

    def rotate(self) -> None:
        """Empty a full file into the one before. What is written meanwhile may be lost, which no writer notices."""
        if self._size > self._max_bytes:
            with ignore_disk_full():
                shutil.copyfile(self._path, older(self._path))
                os.truncate(self._path, 0)
                self._begin = 0

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of all processes, oldest first."""
        lines = [line.decode(errors="replace") for line in read_end(self._path, self._max_bytes)]
        return lines[-count:] if count else []

    def last_words(self) -> str:
        """Return the error of the newest process, or its last lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(self._begin, self._size - 16 * _LONGEST_MESSAGE))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except FileNotFoundError:
            return ""
        error = next((number for number in reversed(range(len(lines))) if ": error: " in lines[number]), None)
        return "\n".join(lines[-6:] if error is None else lines[error:])[-_LONGEST_MESSAGE:]


LOCK_DEADLINE_S = 300.0
DRAIN_S = 300.0
"""Between SIGTERM and SIGKILL: a step may have to end, and a checkpoint be written."""
_LOOK_EVERY_S = 0.1
_OF_RAY = ("CUDA_VISIBLE_DEVICES", "RAY_JOB_ID", "RAY_RAYLET_PID")


class _NotStartedError(Exception):
    """The command was not started; the text has the reason."""


class Daemon:
    """An asynchronous actor. Its methods take and give plain values and JSON.

    Args:
        plan: `Plan` as JSON.
        gpus: as `--gpu` takes them.
    """

    def __init__(self, plan: bytes, name: str) -> None:
        self._plan = msgspec.json.decode(plan, type=Plan)
        self._name = name
        self._node, self._gpus = _place()
        self._folder = daemon_folder(self._plan, name)
        self._output = Output(self._folder / f"{name}.log")
        self._report = DaemonReport(name=name, phase="new", node=self._node, since=time.time())
        self._process: KeptProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self._draining = asyncio.Event()

    async def begin(self, keys: dict[str, bytes]) -> None:
        """Start the command; nothing if it was started.

        Args:
            keys: files for a producer, by name.
        """
        if self._life is None:
            self._life = asyncio.create_task(self._live_or_say(keys))

    async def report(self) -> bytes:
        """A `DaemonReport` as JSON."""
        status = await asyncio.to_thread(self._status) if self._report.phase == "running" else None
        return msgspec.json.encode(msgspec.structs.replace(self._report, status=status))

    async def last_lines(self, count: int) -> list[str]:
        return self._output.last_lines(count)

    async def drain(self) -> None:
        """Have the command end well, within `DRAIN_S`; it is not started again. Does not wait."""
        self._draining.set()
        self._note(self._report.phase)
        if self._process is not None:
            self._process.terminate()
        elif self._life is None:
            self._note("ended")

    async def kill(self) -> None:
        """End the command with everything that it started, at once."""
        self._draining.set()
        if self._process is not None:
            for pid in reversed(descendants(self._process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def _live_or_say(self, keys: dict[str, bytes]) -> None:
        try:
            await self._live(keys)
        except OSError as error:  # `slipstream cluster up` would wait for it
            await self.drain()
            self._note("ended", exit_code=ExitCode.BUG, pid=None, message=f"its actor failed: {error}")

    async def _live(self, keys: dict[str, bytes]) -> None:
        failures = 0
        with _private_files(keys) as place:
            while True:
                if self._name == TRAINER and not await self._lock_is_free():
                    return None
                try:
                    code, ran_s = await self._run(place)
                    words = self._output.last_words() if code > 0 else ""
                except _NotStartedError as error:
                    code, ran_s, words = ExitCode.BUG, 0.0, str(error)
                again = None if self._draining.is_set() else restart(code, ran_s, failures)
                if again is None:
                    return self._note("ended", exit_code=code, pid=None, message=words)
                failures = again.failures
                message = f"{exit_text(code)}; starts again in {again.pause_s:g} s\n{words}".strip()
                self._note("pausing", exit_code=code, pid=None, message=message)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._draining.wait(), again.pause_s)
                if self._draining.is_set():
                    return self._note("ended")

    async def _run(self, keys: Path) -> tuple[int, float]:
        """Run one process from start to end; return its exit code and seconds."""
        started = time.monotonic()
        command = daemon_command(self._plan, self._name, self._gpus, self._folder, keys)
        try:
            self._process = self._started(command)
        except OSError as error:
            raise _NotStartedError(f"it cannot be started: {error}") from error
        self._note("running", starts=self._report.starts + 1, message="")
        while (code := await self._process.exited(0)) is None:
            if self._report.pid is None:
                self._report = msgspec.structs.replace(self._report, pid=_child_of(self._process.pid))
            self._output.rotate()
            await asyncio.sleep(_LOOK_EVERY_S)
        self._process = None
        return code, time.monotonic() - started

    def _started(self, command: list[str]) -> KeptProcess:
        output = self._output.opened()
        try:
            return KeptProcess(
                command,
                DRAIN_S,
                cwd=_working_folder(self._plan, self._folder),
                env=_environment(self._plan),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        finally:
            os.close(output)

    async def _lock_is_free(self) -> bool:
        """Wait until no other trainer works in run_dir; notes the end if that takes too long."""
        file, until = Path(self._plan.run_dir) / "journal.sqlite.lock", time.monotonic() + LOCK_DEADLINE_S
        while _is_locked(file):
            self._note("locked", message=f"another trainer still works in {self._plan.run_dir}; waiting for its end")
            if self._draining.is_set() or time.monotonic() > until:
                message = f"another trainer has worked in {self._plan.run_dir} for {LOCK_DEADLINE_S:g} s: stop it"
                self._note("ended", exit_code=ExitCode.ENDPOINT_IN_USE, message=message)
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    def _status(self) -> Status | None:
        """The daemon's own document, if it answers."""
        found = find_daemons(RunReader(self._folder if self._name != TRAINER else Path(self._plan.run_dir)), ())
        job = "rl-trainer" if self._name == TRAINER else "rl-producer"
        mine = [source for source in found if source.job == job and not source.process_gone]
        return next((answer.status for answer in ask(mine) if answer.status is not None), None)

    def _note(self, phase: Phase, **changes: object) -> None:
        since = self._report.since if phase == self._report.phase else time.time()
        changes |= {"phase": phase, "since": since, "draining": self._draining.is_set()}
        self._report = msgspec.structs.replace(self._report, **changes)


def daemon_folder(plan: Plan, name: str) -> Path:
    """Return the folder of a daemon on its node: the trainer's is in run_dir, a producer's in the user's cache."""
    if name == TRAINER:
        return Path(plan.run_dir) / "cluster"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "slipstream" / namespace(plan.run_dir) / name


def _place() -> tuple[str, list[str]]:
    """The address of this node, and the GPUs that Ray gave this actor."""
    import ray

    return ray.util.get_node_ip_address(), list(map(str, ray.get_gpu_ids()))


@contextlib.contextmanager
def _private_files(files: dict[str, bytes]) -> Iterator[Path]:
    with scratch_folder() as folder:
        for name, content in files.items():
            with open(folder / name, "xb", opener=private) as file:
                file.write(content)
        yield folder


def _working_folder(plan: Plan, own: Path) -> Path:
    """A producer's node need not have the folder in which `up` was called."""
    there = Path(plan.folder)
    return there if there.is_dir() else own


def _environment(plan: Plan) -> dict[str, str]:
    """Ray's own variables are for its worker; threads are those that the daemon has reserved."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
    return kept | {"OMP_NUM_THREADS": str(plan.cpus), "PYTHONUNBUFFERED": "1"}


def _child_of(keeper: int) -> int | None:
    return next(iter(descendants(keeper)[1:]), None)


def _is_locked(file: Path) -> bool:
    try:
        with file.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
