"""The HTTP port over a real socket: what it answers, where it says it is, and what it refuses."""

import collections
import errno
import json
import os
import socket
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Info

from protocol import exposition
from protocol.errors import ConfigError, EndpointInUseError
from protocol.exposition import Targets
from protocol.runtime import logs
from protocol.runtime.health import Health, Notifier

pytestmark = pytest.mark.usefixtures("own_logging")


def health() -> Health:
    return Health(60.0, Notifier(None))


def served(
    folder: Path,
    registry: CollectorRegistry | None = None,
    state: Health | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AbstractContextManager[str]:
    registry, targets = registry or CollectorRegistry(), Targets("/runs/sums")
    names = {"key": "trainer_metrics_port", "job": "rl-trainer", "name": "host-1"}
    return exposition.serve(registry, state or health(), targets, host, port, folder=folder, **names)


def get(address: str, path: str, accept: str = "*/*") -> tuple[int, str, bytes]:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def test_metrics_come_in_the_text_format_under_their_own_names_whatever_prometheus_would_like(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Counter("rl_trainer_things", "Things.", registry=registry).inc(3)
    Counter("vllm:things", "Things.", registry=registry).inc(4)
    with served(tmp_path, registry=registry) as address:
        status, content_type, body = get(address, "/metrics", "application/openmetrics-text;version=1.0.0,text/plain")
    assert status == 200
    assert content_type.startswith("text/plain")
    assert b"rl_trainer_things_total 3.0\n" in body
    assert b"vllm:things_total 4.0\n" in body


def test_every_metric_tells_of_which_run_it_is_as_soon_as_that_is_known(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Counter("rl_trainer_things", "Things.", ["kind"], registry=registry).labels("a").inc(3)
    Info("rl_trainer", "This.", registry=registry).info({"run": "own"})
    with served(tmp_path, registry=registry) as address:
        before = get(address, "/metrics")[2]
        logs.bind(run="5f0c")
        after = get(address, "/metrics")[2]
        (target,) = json.loads(get(address, "/targets")[2])
    assert b'rl_trainer_things_total{kind="a"} 3.0\n' in before
    assert b'rl_trainer_things_total{kind="a",run="5f0c"} 3.0\n' in after
    assert b'rl_trainer_info{run="own"} 1.0\n' in after
    assert registry.get_sample_value("rl_trainer_things_total", {"kind": "a"}) == 3.0
    assert target["labels"]["run"] == "5f0c"


def test_health_and_readiness_come_with_reasons_and_503_when_something_is_wrong(tmp_path: Path) -> None:
    state = health()
    with served(tmp_path, state=state) as address:
        assert get(address, "/healthz")[0] == 200
        status, content_type, body = get(address, "/readyz")
        assert (status, content_type) == (503, "application/json")
        assert json.loads(body) == {"status": "failing", "checks": {"phase": "starting"}}
        state.started("")
        state.check_alive("disk", lambda: "99% full")
        status, _, body = get(address, "/healthz")
        assert (status, json.loads(body)) == (503, {"status": "failing", "checks": {"disk": "99% full"}})


def test_the_status_is_one_document_and_any_other_path_is_not_found(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        status, content_type, body = get(address, "/status")
        assert get(address, "/../etc/passwd")[0] == 404
    assert (status, content_type) == (200, "application/json")
    document = json.loads(body)
    assert (document["job"], document["daemon"]) == ("rl-trainer", "host-1")
    assert document["at"] >= document["started"]


def test_prometheus_is_told_of_the_daemon_itself(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        status, content_type, body = get(address, "/targets")
    assert (status, content_type) == (200, "application/json")
    labels = {"job": "rl-trainer", "daemon": "host-1", "host": socket.gethostname(), "run": "", "run_dir": "/runs/sums"}
    assert json.loads(body) == [{"targets": [address], "labels": labels}]


def test_the_address_stands_in_the_folder_for_as_long_as_it_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    with served(folder) as address:
        (group,) = json.loads((folder / "rl-trainer-host-1.json").read_text())
        owner = {"host": socket.gethostname(), "daemon": "host-1", "job": "rl-trainer", "pid": str(os.getpid())}
        assert group == {"targets": [address], "labels": owner}
    assert list(folder.iterdir()) == []


def test_what_a_killed_daemon_left_is_removed_and_what_others_serve_or_wrote_stays(tmp_path: Path) -> None:
    def left(name: str, host: str, pid: int) -> None:
        labels = {"host": host, "pid": str(pid), "daemon": name, "job": "rl-producer"}
        (tmp_path / f"{name}.json").write_text(json.dumps([{"targets": ["127.0.0.1:1"], "labels": labels}]))

    left("dead", socket.gethostname(), 2**22 + 1)  # above the kernel's greatest process id
    left("alive", socket.gethostname(), os.getpid())
    left("elsewhere", "another-host", 2**22 + 1)
    (tmp_path / "strange.json").write_text("not ours")
    with served(tmp_path):
        pass
    assert sorted(file.name for file in tmp_path.iterdir()) == ["alive.json", "elsewhere.json", "strange.json"]


def test_a_folder_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir: .*/file.* cannot be written: Not a directory"):
        served(tmp_path / "file" / "metrics").__enter__()


def test_on_a_full_disk_it_serves_without_saying_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with served(tmp_path) as address:
        assert get(address, "/healthz")[0] == 200
        assert not list(tmp_path.glob("*.json"))


def test_a_port_in_use_is_refused_with_the_key_to_change(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EndpointInUseError, match=f"observability.trainer_metrics_port: 127.0.0.1:{port} is in use"):
            served(tmp_path, port=port).__enter__()


def test_an_address_of_another_machine_is_refused_as_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observability\.metrics_host"):
        served(tmp_path, host="192.0.2.1").__enter__()


def test_ipv6_loopback_is_written_with_brackets(tmp_path: Path) -> None:
    with served(tmp_path, host="::1") as address:
        assert address.startswith("[::1]:")
        assert get(address, "/healthz")[0] == 200


def test_checks_of_healthz_are_metrics_too() -> None:
    registry, state = CollectorRegistry(), health()
    exposition.add_watch_metrics(registry, "rl_trainer", state, collections.Counter())
    state.check_alive("disk", lambda: "99% full")
    state.check_alive("memory", lambda: None)
    state.check_ready("journal", lambda: "cannot be written")
    assert registry.get_sample_value("rl_trainer_check_failing", {"check": "disk"}) == 1
    assert registry.get_sample_value("rl_trainer_check_failing", {"check": "memory"}) == 0
    assert registry.get_sample_value("rl_trainer_check_failing", {"check": "journal"}) is None, "/readyz only"
