"""The other ranks of rank 0: started, connected, ended.

Guarantee: they end with this process, however it ends. One that cannot start ends the start with its own message.
"""

import contextlib
import datetime
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.distributed as dist

from consumer.ranks.exchange import ALONE, ProcessRanks, Ranks
from consumer.ranks.placement import Placement
from consumer.ranks.presence import RankWatch
from protocol.config.run import RunConfig
from protocol.errors import RankLostError
from protocol.processes.tree import exit_text

FOREVER_S = 30 * 86_400.0  # of collective operations: who is gone is noticed by `consumer.ranks.presence`
_HOST = "127.0.0.1"


class Member(msgspec.Struct, frozen=True):
    """What a rank learns on its standard input."""

    config: msgspec.Raw
    rank: int
    world: int
    host: str
    port: int
    on_gpu: bool
    parent: int


@contextlib.contextmanager
def team(config: RunConfig, placement: Placement, on_lost: Callable[[RankLostError], None]) -> Iterator[Ranks]:
    """Starts the other ranks and waits for them.

    Args:
        on_lost: is called on another thread when one of them is lost.

    Raises:
        RankLostError: instead of an error within the context that came from a lost rank.
    """
    if placement.world == 1:
        yield ALONE
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    wait = datetime.timedelta(seconds=FOREVER_S)
    listener = socket.create_server((_HOST, 0))  # a store that binds itself listens at every address
    store = dist.TCPStore(
        _HOST, listener.getsockname()[1], placement.world, is_master=True, timeout=wait, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    described, on_gpu = msgspec.Raw(config.model_dump_json().encode()), bool(placement.gpus)
    processes = {
        rank: start(
            Member(described, rank, placement.world, _HOST, store.port, on_gpu, os.getpid()),
            placement.environment(rank),
        )
        for rank in range(1, placement.world)
    }

    def kill(_: object = None) -> None:
        for process in processes.values():
            process.kill()

    seen = dist.TCPStore(_HOST, store.port, placement.world, is_master=False, timeout=wait)
    ended = {rank: lambda process=process: _how(process) for rank, process in processes.items()}
    watch = RankWatch(seen, placement.world, ended, [kill, on_lost])
    watch.start()
    try:
        yield ProcessRanks(store, 0, placement.world, torch.device("cuda" if placement.gpus else "cpu"), FOREVER_S)
    except Exception:
        watch.check()
        raise
    finally:
        watch.close()
        kill()
        for process in processes.values():
            process.wait()


def start(member: Member, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "consumer.follower"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | environment)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(msgspec.json.encode(member))
    return process


def _how(process: "subprocess.Popen[bytes]") -> str | None:
    code = process.poll()
    return None if code is None else exit_text(code)
