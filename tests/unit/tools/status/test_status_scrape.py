"""Asking daemons over real sockets."""

import json
import os
import re
import socket
import threading
from pathlib import Path

import psutil
import pytest

from docs.generate_metrics import producer_registry, trainer_registry
from protocol.service import exposition
from protocol.service.health import Health
from protocol.service.systemd import Notifier
from tools.status import scrape as status_scrape
from tools.status.scrape import look, parse
from tools.status.sources import Source, find_sources


def test_a_daemon_is_found_by_its_file_and_tells_what_it_is(tmp_path: Path) -> None:
    health = Health(60.0, Notifier(None))
    names = {"key": "k", "job": "rl-trainer", "name": "host-1", "folder": tmp_path / "metrics"}
    with exposition.serve(trainer_registry(), health, "127.0.0.1", 0, **names) as address:
        assert find_sources(tmp_path, [address]) == [Source(address, "rl-trainer", "host-1")], "named twice, asked once"
        (answer,) = look(find_sources(None, [address]))
    assert (answer.job, answer.error) == ("rl-trainer", None)
    assert answer.told("rl_trainer_info", "run") == "RUN"
    assert answer.checks == {"phase": "starting"}
    assert answer.value("rl_trainer_loss") is None, "NaN"
    assert answer.value("rl_trainer_groups_received_total", outcome="stale") == 0.0
    assert find_sources(tmp_path, []) == [], "a daemon takes its file along"


def test_a_daemon_that_was_killed_is_known_by_the_file_that_it_left(tmp_path: Path) -> None:
    dead = next(pid for pid in range(4_000_000, 4_100_000) if not psutil.pid_exists(pid))
    folder = tmp_path / "metrics"
    folder.mkdir()

    def write(name: str, pid: int, host: str, port: int) -> None:
        labels = {"host": host, "daemon": name, "job": "rl-producer", "pid": str(pid)}
        (folder / f"rl-producer-{name}.json").write_text(
            json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": labels}])
        )

    here = socket.gethostname()
    write("killed", dead, here, 1)
    write("elsewhere", dead, f"not-{here}", 2)
    write("alive", os.getpid(), here, 3)
    (folder / "torn.json").write_text('[{"targets": [')
    (folder / "odd.json").write_text("[3]")
    sources = find_sources(tmp_path, ["127.0.0.1:1"])
    assert [(source.daemon, source.process_gone) for source in sources] == [
        ("alive", False),
        ("elsewhere", False),
        ("killed", True),
        (None, False),  # another daemon may have the port now
    ]
    assert look([sources[2]])[0].error == "gone without a word, perhaps killed"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\nother_things 3\n", "no daemon of Slipstream"),
        (b"HTTP/1.0 200 OK\r\n\r\nrl_trainer_step x\n", "something else than metrics"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "status 404"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "something else than metrics"),
        (b"", "something else than metrics|closed connection"),
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
        (answer,) = look([Source(f"127.0.0.1:{server.getsockname()[1]}")])
        thread.join()
    assert answer.error is not None
    assert re.search(reason, answer.error), answer.error


def test_nobody_at_the_address_and_nobody_who_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_scrape, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        mute = f"127.0.0.1:{server.getsockname()[1]}"
        (silent,) = look([Source(mute)])
    (refused,) = look([Source(mute)])
    assert (silent.error, refused.error) == ("timed out", "connection refused")
    assert look([]) == []


def test_of_the_numbers_ours_are_kept() -> None:
    assert parse('vllm:x 1\nrl_producer_leases{stage="a"} 2\nrl_producer_y NaN\nrl_producer_z +Inf\n') == {
        ("rl_producer_leases", frozenset({("stage", "a")})): 2.0
    }


def test_a_producer_is_known_by_what_it_shows(tmp_path: Path) -> None:
    names = {"key": "k", "job": "rl-producer", "name": "p", "folder": tmp_path}
    with exposition.serve(producer_registry(), Health(60.0, Notifier(None)), "127.0.0.1", 0, **names) as address:
        assert look([Source(address)])[0].job == "rl-producer"
