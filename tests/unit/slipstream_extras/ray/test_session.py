"""What is said when there is no Ray, or one that cannot be used."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from protocol.errors import ConfigError, ExitCode, IncompatiblePeerError, NoAnswerError
from slipstream.cli import run
from slipstream_extras.ray import session
from slipstream_extras.ray.session import OwnRay, connected, explained, find_address
from tests.integration.pair import gone


@pytest.fixture
def stranger() -> Iterator[str]:
    """A server that is no Ray."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.fixture(autouse=True)
def _no_ray_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_no_ray_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "status", "--run", str(tmp_path)]) == ExitCode.NO_ANSWER
    assert "start the run with slipstream cluster up, or name Ray with --address" in capsys.readouterr().err


def test_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert run(["cluster", "down", "--run", str(tmp_path), "--address", address]) == ExitCode.NO_ANSWER
    assert f"--address {address}: no Ray answers there; start one" in capsys.readouterr().err


def test_something_else_listens(tmp_path: Path, stranger: str) -> None:
    with pytest.raises(NoAnswerError, match="no Ray answers there"), connected(tmp_path, stranger):
        pass


def test_behind_tls_a_listener_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that waits for TLS does not answer in plain HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert session._answers(address)
    assert not session._answers(address)


def test_an_address_that_is_none(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"expected HOST:PORT, such as 10\.0\.0\.5:6379"),
        connected(tmp_path, "cluster"),
    ):
        pass


def test_ray_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["cluster", "status", "--run", str(tmp_path)]) == ExitCode.CONFIG
    assert "pip install '.[ray]'" in capsys.readouterr().err


def test_another_version_of_ray_or_python_as_ray_itself_says_it() -> None:
    from ray._private.utils import check_version_info

    for cluster in (
        {"ray_version": "2.9.0", "python_version": "3.11.0"},
        {"ray_version": "2.60.0", "python_version": "3.8.1"},
    ):
        with pytest.raises(RuntimeError) as said:
            check_version_info(cluster, "10.0.0.9")
        error = explained(said.value, "10.0.0.5:6379")
        assert isinstance(error, IncompatiblePeerError)
        assert error.exit_code == ExitCode.INCOMPATIBLE_PEER
        for version in cluster.values():
            assert version in str(error)
    other = explained(RuntimeError("no node here"), "10.0.0.5:6379")
    assert isinstance(other, ConfigError)
    assert "run slipstream cluster on one of its nodes" in str(other)


def test_what_ray_prints_of_its_own_can_be_silenced() -> None:
    from ray._private import worker

    assert callable(worker.print_to_stdstream)


def test_the_address_of_a_ray_that_up_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = psutil.Process()
    (tmp_path / "cluster").mkdir()
    file = tmp_path / "cluster/ray.json"

    def write(pid: int, began: float) -> None:
        file.write_bytes(msgspec.json.encode(OwnRay("127.0.0.1:6379", pid, began)))

    write(me.pid, me.create_time())
    assert find_address(tmp_path, None) == "127.0.0.1:6379"
    assert find_address(tmp_path, "10.0.0.5:6379") == "10.0.0.5:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    assert find_address(tmp_path, None) == "10.0.0.7:6379"
    monkeypatch.delenv("RAY_ADDRESS")
    write(me.pid, me.create_time() - 1000)
    assert find_address(tmp_path, None) is None, "another process has its number"
    file.write_text("{")
    assert find_address(tmp_path, None) is None


def test_a_ray_that_nobody_would_know_of_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it starts, which it does not get. The wait for it raises then."""
    real, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def sleeper(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(["sleep", "60"], **options))
        return started[0]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", sleeper)
    monkeypatch.setattr(session, "_answers", lambda address: False)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.start_here(tmp_path, 1, interrupted)
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()
    assert [file.name for file in (tmp_path / "cluster").iterdir()] == ["ray.log"]


@pytest.mark.long
def test_a_ray_of_ours_is_ended_with_what_it_started_and_another_process_is_not(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    source = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)'])"
    started = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stdout.read(1) == b"1"
    process = psutil.Process(started.pid)
    children = process.children()
    own = OwnRay("127.0.0.1:1", process.pid, process.create_time())
    session.end_own(tmp_path, OwnRay("127.0.0.1:1", process.pid, process.create_time() - 100))
    assert process.is_running()
    session.end_own(tmp_path, own)
    started.stdout.close()
    started.wait(10)
    assert gone(children)
