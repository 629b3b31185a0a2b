"""An address over which code may come, or a refusal before any connection is made."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import ConfigError, ExitCode
from slipstream_extras.bundle.trainer_address import TrainerAddress, trainer_address
from tests.unit.slipstream_extras.bundle.bundle_server import make_keys


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
    assert said.startswith(f"--connect {endpoint}: expected `ipc:///path` or `tcp://HOST:PORT`")


def test_keys_that_are_not_there_are_named(tmp_path: Path) -> None:
    said = refusal("tcp://127.0.0.1:5557", str(tmp_path / "nowhere"), ["transport.identity=gpu01"])
    assert f"{tmp_path}/nowhere/gpu01.secret: no such file. Make it: slipstream keys" in said


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


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process takes itself for another user than the owner of its files, and root for a third."""
    monkeypatch.setattr("slipstream_extras.bundle.trainer_address._ROOT", 54321)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    return 12345


@pytest.fixture
def listener(short_dir: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_dir / "control.ipc"))
        yield short_dir / "control.ipc"


def test_a_socket_of_this_user_is_trusted(listener: Path) -> None:
    trainer_address(f"ipc://{listener}", None, []).check_owner()


def test_a_socket_or_a_folder_of_another_user_is_not(
    listener: Path, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = TrainerAddress(f"ipc://{listener}", None, None)
    with pytest.raises(ConfigError, match=str(listener)):
        address.check_owner()
    assert f"{listener.parent} is drwx" in refusal(f"ipc://{listener}", None, [])


def test_a_socket_that_is_gone_or_replaced_is_not(listener: Path, tmp_path: Path) -> None:
    address = trainer_address(f"ipc://{listener}", None, [])
    listener.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        address.check_owner()
    other = tmp_path / "file"
    other.touch()
    for make in (listener.touch, lambda: (listener.unlink(), listener.symlink_to(other))):
        make()
        with pytest.raises(ConfigError, match=str(listener)):
            address.check_owner()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_in_which_another_user_can_put_a_socket_is_refused(short_dir: Path, mode: int) -> None:
    shared = short_dir / "shared"
    shared.mkdir()
    shared.chmod(mode)
    assert f"{shared} is" in (said := refusal(f"ipc://{shared}/control.ipc", None, []))
    assert "chmod go-w" in said
    assert f"{shared} is" in refusal(f"ipc://{shared}/missing/control.ipc", None, []), "anybody can make the folder"
    (shared / "own").mkdir(0o700)
    if mode & stat.S_ISVTX:
        trainer_address(f"ipc://{shared}/own/control.ipc", None, [])
    else:
        refusal(f"ipc://{shared}/own/control.ipc", None, [])


def test_a_link_in_the_path_is_followed_once(short_dir: Path) -> None:
    (short_dir / "own").mkdir(0o700)
    (short_dir / "link").symlink_to("own")
    assert trainer_address(f"ipc://{short_dir}/link/control.ipc", None, []).endpoint == (
        f"ipc://{os.path.realpath(short_dir)}/own/control.ipc"
    )
