"""A model of the hub, from a server of this process: fetched once, with its stages; what fails says why and what helps."""

import json
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import huggingface_hub.constants as constants
import numpy as np
import pytest
from safetensors.numpy import save

from protocol.errors import ConfigError
from protocol.runtime.health import Health, Notifier
from protocol.wire import hub
from protocol.wire.model_source import fetch_model, resolve_model
from tests.unit.consumer.builders import run_config

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": save({"a": np.zeros(500, np.float32)}),
    "README.md": b"not fetched",
}


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that a download asks. `refusal` is a status and the name of the error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = dict(FILES)
        self.refusal: tuple[int, str] | None = None
        self.sent = Counter[str]()
        self.largest: int | None = None  # a size that is named for the weights

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        server, path = cast("Hub", self.server), self.path.partition("?")[0]
        if server.refusal is not None:
            status, name = server.refusal
            self.send(status, b"{}", with_body=with_body, headers={"X-Error-Code": name})
        elif "/tree/" in path:
            self.send(200, json.dumps([self.listed(name) for name in server.files]).encode(), with_body=with_body)
        elif path.startswith("/api/models/"):
            self.send(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode(), with_body=with_body)
        else:
            name = path.rpartition("/")[2]
            if with_body:
                server.sent[name] += 1
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
            if server.largest and name == "model.safetensors":
                headers["X-Linked-Size"] = str(server.largest)
            self.send(200, server.files[name], with_body=with_body, headers=headers)

    def listed(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(cast("Hub", self.server).files[name]), "oid": name}

    def send(self, status: int, body: bytes, *, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        hub.snapshot.cache_clear()
        yield server
        hub.snapshot.cache_clear()
        server.shutdown()
        thread.join()


def refusal(name: str = "org/name", revision: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, revision)
    return str(caught.value)


def test_a_model_is_fetched_once_and_then_the_cache_s(
    served: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = resolve_model("org/name")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: data for name, data in FILES.items() if name != "README.md"
    }
    said = [record.getMessage() for record in caplog.records if record.name == hub.__name__]
    assert said[0] == f"downloading org/name (0.0 GB) to {tmp_path}/cache"
    assert said[-1].startswith("downloaded org/name in ")
    hub.snapshot.cache_clear()
    assert resolve_model("org/name") == folder
    assert max(served.sent.values()) == 1


def test_a_download_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SAY_EVERY_S", 0.001)
    said, texts = threading.Event(), list[str]()

    def note(text: str, *values: object) -> None:
        texts.append(text % values)
        said.set()

    monkeypatch.setattr(hub.logger, "info", note)
    (tmp_path / "old").write_bytes(bytes(100))
    with hub._progress("org/name", 4_000_000_000, tmp_path):
        assert said.wait(10)
    assert texts[0] == "downloading org/name: 0.0 of 4.0 GB after 0 s"
    assert texts[-1] == "downloaded org/name in 0 s"


def test_both_daemons_ask_at_once_and_each_file_is_sent_once(served: Hub) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(hub.snapshot.__wrapped__, "org/name", None, ("*.json", "*.safetensors"), "k") for _ in "ab"
        ]
        folders = {each.result() for each in asked}
    assert len(folders) == 1
    assert max(served.sent.values()) == 1


def test_the_download_is_a_stage_of_the_start(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    health = Health(10.0, Notifier(None))
    seen: list[str | None] = []
    monkeypatch.setattr(hub, "_check_room", lambda *_: seen.append(health.ready()["phase"]))
    fetch_model(run_config(tmp_path, "org/name").model, health)
    assert seen == ["downloading org/name"]


def test_a_broken_snapshot_is_named_like_a_broken_folder(served: Hub) -> None:
    served.files["model.safetensors"] = b"version https://git-lfs.github.com/spec/v1\n"
    assert "model.safetensors is a pointer of Git LFS" in refusal()


@pytest.mark.parametrize(
    ("status", "name", "said"),
    [
        (401, "GatedRepo", "it is gated; accept its terms at http://127.0.0.1"),
        (403, "GatedRepo", "it is gated"),
        (404, "RepoNotFound", "there is no such repository, or it is private"),
        (401, "RepoNotFound", "there is no such repository, or it is private"),
        (404, "RevisionNotFound", "it has no revision abc"),
        (403, "", "HTTP 403"),
        (500, "", "HTTP 500"),
    ],
)
def test_what_the_hub_refuses_says_the_cure(served: Hub, status: int, name: str, said: str) -> None:
    served.refusal = status, name
    text = refusal(revision="abc")
    assert text.startswith(f"model.path: org/name is no folder here ({Path.cwd()}/org/name) and cannot be fetched")
    assert said in text


def test_a_hub_that_does_not_answer(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer" in refusal()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal()


def test_without_a_network_a_whole_copy_is_enough(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model("org/name")
    hub.snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/name") == folder


def test_a_disk_without_room_is_named_with_both_sizes_and_nothing_is_fetched(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.largest = 140_000_000_000
    usage = shutil.disk_usage("/")._replace(free=20_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    text = refusal()
    assert "takes 140.0 GB" in text
    assert "20.0 GB free" in text
    assert not served.sent


def test_a_disk_that_fills_up_meanwhile(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    assert "has no room left" in refusal()
