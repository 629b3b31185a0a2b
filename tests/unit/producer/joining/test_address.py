"""An address over which code may come, or a refusal before any connection is made."""

from pathlib import Path

import pytest

from producer.joining.address import trainer_address
from protocol.errors import ConfigError, ExitCode
from tests.unit.producer.joining.bundle_server import make_keys


@pytest.fixture
def keys(tmp_path: Path) -> str:
    make_keys(tmp_path, "gpu01")
    return str(tmp_path / "gpu01")


def refusal(*arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        trainer_address(*arguments)  # type: ignore[arg-type]
    assert caught.value.exit_code == ExitCode.CONFIG == 78
    return str(caught.value)


@pytest.mark.parametrize("host", ["10.0.0.5", "127.0.0.1", "localhost", "[::1]"])
def test_tcp_needs_keys_also_on_loopback(host: str, keys: str) -> None:
    said = refusal(f"tcp://{host}:5557", None, [])
    assert said.startswith(
        f"--connect tcp://{host}:5557: a producer runs what the trainer gives it, so over TCP both need keys"
    )
    assert "--keys FOLDER" in said
    address = trainer_address(f"tcp://{host}:5557", keys, ["transport.identity=gpu01"])
    assert address.blob_endpoint("") == f"tcp://{host}:5558"
    assert address.keys is not None
    assert address.keys.identity == "gpu01"


def test_a_socket_file_needs_none_but_a_name_without_a_file_does(tmp_path: Path) -> None:
    assert trainer_address("ipc:///run/control.ipc", None, []).blob_endpoint("") == "ipc:///run/control.ipc.blobs"
    assert "both need keys" in refusal("ipc://@control", None, [])


@pytest.mark.parametrize(
    "endpoint", ["10.0.0.5:5557", "tcp://10.0.0.5", "http://10.0.0.5:1", "ipc://", "tcp://h:0", ""]
)
def test_what_is_no_address_is_refused(endpoint: str, keys: str) -> None:
    said = refusal(endpoint, keys, ["transport.identity=gpu01"])
    assert said == f"--connect {endpoint}: expected `ipc:///path` or `tcp://HOST:PORT`"


def test_keys_that_are_not_there_are_named(tmp_path: Path) -> None:
    said = refusal("tcp://127.0.0.1:5557", str(tmp_path / "nowhere"), ["transport.identity=gpu01"])
    assert f"{tmp_path}/nowhere/gpu01.secret: no such file. Make it: rl-keys" in said


def test_what_the_address_says_is_not_said_twice(keys: str) -> None:
    for key in ("endpoint", "blob_endpoint", "keys"):
        assert f"--set transport.{key}: with --connect it comes from" in refusal(
            "ipc:///x", None, [f"transport.{key}=y"]
        )


def test_where_blobs_are_may_be_said_and_must_be_as_safe(keys: str) -> None:
    tcp = trainer_address("tcp://10.0.0.5:5557", keys, ["transport.identity=gpu01"])
    assert tcp.blob_endpoint("tcp://*:7000") == tcp.blob_endpoint("tcp://0.0.0.0:7000") == "tcp://10.0.0.5:7000"
    assert tcp.blob_endpoint("tcp://10.0.0.6:7000") == "tcp://10.0.0.6:7000"
    ipc = trainer_address("ipc:///x", None, [])
    assert ipc.blob_endpoint("ipc:///y") == "ipc:///y"
    for offered in ("tcp://127.0.0.1:7000", "ipc://@y", "tcp://*:7000", "nonsense"):
        with pytest.raises(ConfigError):
            ipc.blob_endpoint(offered)


def test_a_socket_of_another_user_is_not_trusted(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = trainer_address(f"ipc://{short_dir}/control.ipc", None, [])
    address.check_owner()
    (short_dir / "control.ipc").touch()
    address.check_owner()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    owner = (short_dir / "control.ipc").stat().st_uid
    if owner == 0:
        address.check_owner()
        monkeypatch.setattr("producer.joining.address._ROOT", 54321)
    with pytest.raises(ConfigError, match="belongs to another user, whose code this producer would run"):
        address.check_owner()
