"""A trainer offers its bundle where it knows who asks, and says why it does not elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from consumer.link.offered_bundle import NO_BUNDLE, OfferedBundle, offered_bundle
from protocol.config.loader import load_config
from protocol.wire.messages import BlobChunk, BlobRequest, BundleOffer, Reject
from slipstream_extras.bundle.bundle import decode, digest_of
from tests.unit.protocol.config.files import MINIMAL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offer(folder: Path, **transport: Any) -> OfferedBundle:
    (folder / "run.yaml").write_text(yaml.safe_dump(yaml.safe_load(MINIMAL) | {"transport": transport}))
    return offered_bundle(load_config(str(folder / "run.yaml")), folder)


def test_over_a_socket_file_or_with_keys_it_is_offered(folder: Path) -> None:
    offered = offer(folder, blob_chunk_bytes=2048)
    assert offered.answer == BundleOffer(digest_of(offered.data), len(offered.data), 2048)
    assert [file.name for file in decode(offered.data).files] == ["rewards.py", "run.yaml"]
    for transport in (
        {"endpoint": "tcp://127.0.0.1:5557"},
        {"endpoint": "tcp://0.0.0.0:5557", "blob_endpoint": "tcp://*:6"},
    ):
        answer = offer(folder, keys="keys", **transport).answer
        assert isinstance(answer, BundleOffer)
        assert answer.blob_endpoint == transport.get("blob_endpoint", "")


@pytest.mark.parametrize(
    "transport",
    [
        {"endpoint": "tcp://127.0.0.1:5557"},
        {"endpoint": "tcp://[::1]:5557"},
        {"endpoint": "ipc://@anybody"},
        {"blob_endpoint": "tcp://127.0.0.1:5557"},
    ],
)
def test_where_any_user_of_the_host_may_connect_it_is_not(
    folder: Path, caplog: pytest.LogCaptureFixture, transport: dict[str, str]
) -> None:
    offered = offer(folder, **transport)
    assert isinstance(offered.answer, Reject)
    assert "has no keys" in offered.answer.problems[0]
    assert offered.answer.problems[0].endswith("Or start this producer with --config FILE")
    assert (offered.data, offered.digest) == (b"", "")
    assert caplog.text == "", "a run without such producers needs none"


def test_a_run_that_cannot_be_bundled_goes_on_and_says_why(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "rewards.py").write_text("def f(:\n")
    offered = offer(folder)
    assert isinstance(offered.answer, Reject)
    assert "rewards.py is not valid Python" in offered.answer.problems[0]
    assert "producers cannot start with --connect: " in caplog.text


def test_its_chunks_are_its_own(folder: Path) -> None:
    offered = offer(folder)
    size = len(offered.data)
    first = offered.chunk(BlobRequest(offered.digest, 0, 10))
    assert first == BlobChunk(offered.digest, 0, offered.data[:10])
    assert offered.chunk(BlobRequest(offered.digest, size - 3, 10)) == BlobChunk(
        offered.digest, size - 3, offered.data[-3:]
    )
    assert offered.chunk(BlobRequest(offered.digest, size, 10)) is None
    assert offered.chunk(BlobRequest("0" * 64, 0, 10)) is None
    assert NO_BUNDLE.chunk(BlobRequest("0" * 64, 0, 10)) is None
