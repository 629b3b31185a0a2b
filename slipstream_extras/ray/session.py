"""The connection of a command to Ray, and a Ray on this machine where none was named.

Guarantee: a Ray that does not answer, or is of another version, is named with the fix within a minute. A Ray that
`slipstream cluster up` started outlives it, and `slipstream cluster down` ends it by its process id; others are never stopped.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from protocol.config.operation import is_loopback
from protocol.errors import ConfigError, IncompatiblePeerError, NoAnswerError
from protocol.runtime.files import staged
from protocol.runtime.processes import descendants
from slipstream_extras.ray.plan import namespace

_START_S = 60.0
_CONNECT_S = 5.0
_END_S, _LEFT_S = 30.0, 2.0
_SETTINGS = b"\x04"
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5
_FIX = "start one (ray start --head), name another with --address, or leave --address out to use one on this machine"


class OwnRay(msgspec.Struct, frozen=True):
    """A Ray that `up` started: its address, its first process and when that began, as psutil says it."""

    address: str
    pid: int
    began: float

    @property
    def process(self) -> psutil.Process | None:
        """Return the process; None if it is gone, or another process has its number."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.began) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


class Session(NamedTuple):
    address: str
    own: OwnRay | None


def find_address(run_dir: Path, named: str | None) -> str | None:
    """Return the address of `--address` or Ray's own variable, else of a Ray that `up` started and that is alive."""
    own = _own(run_dir)
    return named or os.environ.get("RAY_ADDRESS") or (own.address if own and own.process else None)


@contextlib.contextmanager
def connected(run_dir: Path, named: str | None) -> Iterator[Session]:
    """
    Raises:
        NoAnswerError: there is no Ray.
        IncompatiblePeerError: it, or its Python, has another version.
        ConfigError: Ray is not installed here, or this machine is none of its nodes.
    """
    require_ray()
    address = find_address(run_dir, named)
    if address is None:
        raise NoAnswerError(
            f"no Ray runs for {run_dir}: start the run with slipstream cluster up, or name Ray with --address"
        )
    _check_answers(address)
    own = _own(run_dir)
    os.environ.update(_loopback() if is_loopback(address) else {})
    import ray

    ours = signal.getsignal(signal.SIGTERM)
    try:
        _init(address, run_dir)
        signal.signal(signal.SIGTERM, ours)  # Ray's own raises, after it has printed where C++ stands
        yield Session(address, own if own and own.address == address else None)
    finally:
        ray.shutdown()


def start_here(run_dir: Path, num_cpus: int, sleep: Callable[[float], object]) -> None:
    """Start a Ray with one node, for this machine alone, and leaves word of it in run_dir. Its CPUs are what the run needs: a
    machine of one's own may be overbooked. Where `sleep` raises, it is ended."""
    require_ray()
    folder = run_dir / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    options = ["--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}", "--include-dashboard=false"]
    options += [f"--num-cpus={num_cpus}", f"--object-store-memory={128 * 2**20}"]
    with (folder / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=_loopback(),
        )
    own = OwnRay(address, process.pid, psutil.Process(process.pid).create_time())
    try:
        until = time.monotonic() + _START_S
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > until:
                raise NoAnswerError(f"Ray did not start on this machine; its own messages are in {folder / 'ray.log'}")
            sleep(0.1)
        with staged(folder / "ray.json") as partial:
            partial.write_bytes(msgspec.json.encode(own))
    except BaseException:  # as of Ctrl-C, which the started Ray does not get
        end_own(run_dir, own)
        raise


def end_own(run_dir: Path, own: OwnRay) -> None:
    """End the Ray that `up` started, with its processes."""
    process = own.process
    if process is not None:
        family = [psutil.Process(pid) for pid in descendants(own.pid) if psutil.pid_exists(pid)]
        process.terminate()
        psutil.wait_procs([process], _END_S)
        _, left = psutil.wait_procs(family, _LEFT_S)
        for other in left:
            with contextlib.suppress(psutil.Error):
                other.kill()
    (run_dir / "cluster" / "ray.json").unlink(missing_ok=True)


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "slipstream cluster needs Ray, which is not installed; in Slipstream's checkout: pip install '.[ray]'"
        )


def _init(address: str, run_dir: Path) -> None:
    import ray
    from ray._private import worker

    worker.print_to_stdstream = _say_nothing
    try:
        ray.init(address=address, namespace=namespace(run_dir), log_to_driver=False, logging_level="CRITICAL")
    except RuntimeError as error:
        raise explained(error, address) from error
    except (ConnectionError, TimeoutError, ValueError) as error:
        raise NoAnswerError(f"--address {address}: what answers there is no Ray ({error}); {_FIX}") from error


def _say_nothing(*_: object, **__: object) -> None:
    """Silence Ray's messages about processes that died anywhere: the manager's events explain them."""


def explained(error: RuntimeError, address: str) -> Exception:
    """Turn Ray's error when it cannot be joined into one for the user."""
    text = " ".join(str(error).split())
    if "Version mismatch" in text:
        return IncompatiblePeerError(f"--address {address}: {text}. Install the same Ray and Python on all nodes")
    return ConfigError(
        f"--address {address}: this machine cannot use that Ray; run slipstream cluster on one of its nodes ({text})"
    )


def _check_answers(address: str) -> None:
    if not _answers(address):
        raise NoAnswerError(f"--address {address}: no Ray answers there; {_FIX}")


def _answers(address: str) -> bool:
    """Return whether a gRPC server answers: Ray itself would wait for minutes. Behind TLS a connection has to do."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                return True
            connection.sendall(_HTTP2_PREFACE)
            return connection.recv(4)[3:] == _SETTINGS
    except ValueError:
        raise ConfigError(f"--address {address}: expected HOST:PORT, such as 10.0.0.5:6379") from None
    except OSError:
        return False


def _loopback() -> dict[str, str]:
    """Ray reads this when it is imported; otherwise it takes a loopback address for that of another interface, and hangs."""
    return os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def _own(run_dir: Path) -> OwnRay | None:
    try:
        return msgspec.json.decode((run_dir / "cluster" / "ray.json").read_bytes(), type=OwnRay)
    except (OSError, msgspec.DecodeError):
        return None
