"""Asking daemons over real sockets."""

import re
import socket
import threading
from pathlib import Path

import pytest

from docs.generate_metrics import producer_registry, trainer_registry
from protocol import exposition
from protocol.exposition import Targets
from protocol.runtime.health import Health, Notifier
from slipstream.run_reader import DaemonAddress, RunReader
from slipstream.status import daemons
from slipstream.status.daemons import ask, find_daemons


def test_a_daemon_is_found_by_its_file_and_tells_what_it_is(tmp_path: Path) -> None:
    for job, registry in (("rl-trainer", trainer_registry()), ("rl-producer", producer_registry())):
        names = {"key": "k", "job": job, "name": "host-1", "folder": tmp_path / "metrics"}
        with exposition.serve(
            registry, Health(60.0, Notifier(None)), Targets("run"), "127.0.0.1", 0, **names
        ) as address:
            found = find_daemons(RunReader(tmp_path), [address])
            assert found == [DaemonAddress(address, job, "host-1")], "named twice, asked once"
            (answer,) = ask(find_daemons(None, [address]))
        assert (answer.job, answer.error) == (job, None)
        assert answer.status is not None
        assert answer.status.not_ready == {"phase": "starting"}
    assert find_daemons(RunReader(tmp_path), []) == [], "a daemon takes its file along"


def test_the_trainer_comes_first_and_an_address_that_was_left_is_asked_for_whoever_has_it_now() -> None:
    class Run(RunReader):
        def daemons(self):
            yield DaemonAddress("h:2", "rl-producer", "b")
            yield DaemonAddress("h:1", "rl-producer", "a", process_gone=True)
            yield DaemonAddress("h:3", "rl-trainer", "t")

    found = find_daemons(Run(Path()), ["h:1", "h:2", "h:1"])
    assert [(source.address, source.daemon) for source in found] == [
        ("h:3", "t"), ("h:1", "a"), ("h:2", "b"), ("h:1", None)
    ]  # fmt: skip
    assert ask([found[1]])[0].error == "the process exited unexpectedly"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\nother_things 3\n", "no daemon of Slipstream"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"job": "rl-trainer", "at": "x"}', "no daemon of Slipstream"),
        (b"HTTP/1.0 503 Busy\r\n\r\n", "/status answered with status 503"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "/status answered with status 404"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no daemon of Slipstream"),
        (b"", "no daemon of Slipstream|closed connection"),
    ],
)
def test_whatever_else_answers_is_a_reason_and_no_error(reply: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        (answer,) = ask([DaemonAddress(f"127.0.0.1:{server.getsockname()[1]}")])
        thread.join()
    assert answer.error is not None
    assert re.search(reason, answer.error), answer.error


def test_nobody_at_the_address_and_nobody_who_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        mute = f"127.0.0.1:{server.getsockname()[1]}"
        (silent,) = ask([DaemonAddress(mute)])
    (refused,) = ask([DaemonAddress(mute)])
    assert (silent.error, refused.error) == ("timed out", "connection refused")
    assert ask([]) == []
