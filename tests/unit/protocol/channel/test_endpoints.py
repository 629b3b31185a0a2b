"""Endpoints in use, stale files, paths and addresses that cannot be."""

import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol.channel.client import ZmqClient
from protocol.channel.server import ZmqServer
from protocol.errors import ConfigError, EndpointInUseError, ExitCode
from tests.unit.protocol.channel_harness import LIMIT, Harness, introduce, reserve_port

REPOSITORY = Path(__file__).parents[4]


def start_owner(control: str, blob: str) -> "subprocess.Popen[str]":
    """Another process that serves the endpoints until it is killed."""
    program = (
        "import sys, time\nfrom protocol.channel.server import ZmqServer\n"
        "server = ZmqServer(sys.argv[1], sys.argv[2], 65536)\nprint('bound', flush=True)\ntime.sleep(120)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, control, blob], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "bound\n"
    return owner


@pytest.mark.long
def test_an_ipc_endpoint_of_a_living_process_is_refused_and_of_a_dead_one_reused(ipc: Harness) -> None:
    socket_file = Path(ipc.endpoints[0].removeprefix("ipc://"))
    with start_owner(*ipc.endpoints) as owner:
        with pytest.raises(EndpointInUseError) as caught:
            ipc.server()
        assert str(caught.value) == (
            f"transport.endpoint: {ipc.endpoints[0]} is in use by another process. Stop that trainer, or give this run "
            "an endpoint of its own (run_dir or transport.endpoint)"
        )
        assert caught.value.exit_code == ExitCode.ENDPOINT_IN_USE == 73
        assert stat.S_ISSOCK(socket_file.stat().st_mode), "the refused server must not touch the living one's socket"
        owner.send_signal(signal.SIGKILL)
    assert stat.S_ISSOCK(socket_file.stat().st_mode), "killed, so it left its socket behind"
    server = ipc.server()
    introduce(server, ipc.client(server))


@pytest.mark.parametrize("taken", [0, 1], ids=["control", "blob"])
def test_a_tcp_port_of_a_stranger_is_refused(stack: ExitStack, taken: int) -> None:
    stranger = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    ports = [reserve_port(stack), reserve_port(stack)]
    ports[taken] = stranger.getsockname()[1]
    with pytest.raises(EndpointInUseError, match=f"tcp://127.0.0.1:{ports[taken]} is in use"):
        ZmqServer(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", LIMIT)


def test_a_refused_server_gives_back_what_it_had_taken(ipc: Harness) -> None:
    control, blob = ipc.endpoints
    first = ZmqServer(blob, f"{blob}.2", LIMIT)
    with pytest.raises(EndpointInUseError):
        ZmqServer(control, blob, LIMIT)
    first.close()
    ZmqServer(control, blob, LIMIT).close()


def test_sockets_and_locks_are_private_and_folders_made(short_dir: Path) -> None:
    folder = short_dir / "runs" / "one"
    server = ZmqServer(f"ipc://{folder}/control.ipc", f"ipc://{folder}/control.ipc.blobs", LIMIT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = ("control.ipc", "control.ipc.blobs", "control.ipc.blobs.lock", "control.ipc.lock")
    assert sorted(os.listdir(folder)) == list(names)
    assert stat.S_IMODE((folder / "control.ipc.lock").stat().st_mode) == 0o600
    server.close()


@pytest.mark.parametrize("place", ["control", "blob"])
def test_an_ipc_path_that_is_too_long_is_a_configuration_error_on_both_ends(short_dir: Path, place: str) -> None:
    path = f"{short_dir}/" + "x" * (108 - len(str(short_dir)) - 1)
    ends = [f"ipc://{path}", f"ipc://{short_dir}/short"]
    control, blobs = ends if place == "control" else reversed(ends)
    for make in (ZmqServer, lambda *arguments: ZmqClient("producer", *arguments)):
        with pytest.raises(ConfigError) as caught:
            make(control, blobs, LIMIT)
        assert str(caught.value) == (
            f"transport.endpoint: the socket path {path} is longer than 107 bytes. Set a shorter one, e.g. "
            "transport.endpoint=tcp://127.0.0.1:5557 or ipc:///tmp/NAME/control.ipc"
        )


def test_the_longest_ipc_path_works(short_dir: Path) -> None:
    longest = f"{short_dir}/" + "x" * (107 - len(str(short_dir)) - 1)
    server = ZmqServer(f"ipc://{longest}", f"ipc://{short_dir}/b", LIMIT)
    client = ZmqClient("producer", f"ipc://{longest}", f"ipc://{short_dir}/b", LIMIT)
    introduce(server, client)
    client.close()
    server.close()


def test_a_file_that_is_no_socket_is_refused_and_kept(ipc: Harness, short_dir: Path) -> None:
    precious = short_dir / "control.ipc"
    precious.write_text("thesis")
    with pytest.raises(ConfigError, match="exists and is not a socket; name another path"):
        ipc.server()
    assert precious.read_text() == "thesis"


def test_a_path_that_cannot_be_made_is_a_configuration_error(short_dir: Path) -> None:
    (short_dir / "file").write_text("")
    with pytest.raises(ConfigError, match=r"transport.endpoint: cannot create .*: (Not a directory|File exists)"):
        ZmqServer(f"ipc://{short_dir}/file/control.ipc", f"ipc://{short_dir}/b", LIMIT)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:http", "carrier-pigeon://coop"])
def test_an_endpoint_that_is_none_is_a_configuration_error_on_both_ends(short_dir: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"transport.endpoint: cannot listen at "):
        ZmqServer(endpoint, f"ipc://{short_dir}/short", LIMIT)
    with pytest.raises(ConfigError, match=r"transport.endpoint: cannot connect to "):
        ZmqClient("producer", endpoint, f"ipc://{short_dir}/short", LIMIT)


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_every_loopback_host_of_the_configuration_works(stack: ExitStack, host: str) -> None:
    if host == "[::1]":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    control, blobs = (f"tcp://{host}:{reserve_port(stack)}" for _ in range(2))
    server = ZmqServer(control, blobs, LIMIT)
    stack.callback(server.close)
    client = ZmqClient("producer", control, blobs, LIMIT)
    stack.callback(client.close)
    introduce(server, client)


def test_a_wildcard_is_for_the_trainer_alone(stack: ExitStack, short_dir: Path) -> None:
    control, blobs = f"tcp://*:{reserve_port(stack)}", f"ipc://{short_dir}/b"
    ZmqServer(control, blobs, LIMIT).close()
    with pytest.raises(ConfigError, match=r"give producers the trainer's address with --set transport.endpoint$"):
        ZmqClient("p", control, blobs, LIMIT)
