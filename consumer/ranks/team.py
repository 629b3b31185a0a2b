"""The other ranks, as rank 0 and the hosts see them: started, connected, watched, ended.

Guarantee: none of them outlives the process that started it, however that ends. One that cannot start ends the start with its own
message.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import torch

from consumer.ranks.exchange import ALONE, ProcessRanks, Ranks
from consumer.ranks.placement import Placement
from consumer.ranks.presence import RankWatch, silence_s
from consumer.ranks.rendezvous import (
    FOREVER_S,
    OVER,
    choose_interface,
    connect,
    facts_of,
    gather_hosts,
    listen,
    until_heard,
)
from protocol.config.run import RunConfig
from protocol.errors import ExitCode, RankLostError
from protocol.runtime.processes import exit_text


class Member(msgspec.Struct, frozen=True):
    """The message that a rank reads from its standard input."""

    config: msgspec.Raw
    rank: int
    world: int
    host: str
    port: int
    on_gpu: bool
    parent: int
    silence_s: float


class RankProcesses:
    """The processes of this host's ranks, by number."""

    def __init__(self, started: "dict[int, subprocess.Popen[bytes]]") -> None:
        self._started = started

    def ended(self) -> Iterator[tuple[int, str]]:
        """Yield the ranks that have ended, and how."""
        for rank, process in self._started.items():
            if (code := process.poll()) is not None:
                yield rank, exit_text(code)

    def kill(self) -> None:
        for process in self._started.values():
            process.kill()


@contextlib.contextmanager
def rank_processes(
    config: RunConfig, placement: Placement, ranks: range, world: int, port: int, *, first_index: int
) -> Iterator[RankProcesses]:
    """
    Args:
        port: of the rendezvous.
        first_index: of the first of these ranks among all of this host, which decides its GPU.
    """
    described, on_gpu = msgspec.Raw(config.model_dump_json().encode()), bool(placement.gpus)
    silence = silence_s(config.pipeline.rank_silence_s, placement.nodes.count)
    started = {}
    for index, rank in enumerate(ranks, first_index):
        member = Member(described, rank, world, placement.nodes.host, port, on_gpu, os.getpid(), silence)
        started[rank] = start(member, placement.environment(index))
    try:
        yield RankProcesses(started)
    finally:
        for process in started.values():
            process.kill()
        for process in started.values():
            process.wait()


def start(member: Member, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "consumer.app.follower"]
    # In a process group of its own: Ctrl-C is for rank 0 alone, also before this one has learned to ignore it.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | environment, process_group=0)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(msgspec.json.encode(member))
    return process


@contextlib.contextmanager
def team(
    config: RunConfig, placement: Placement, on_lost: Callable[[RankLostError], None], stop: Callable[[], bool]
) -> Iterator[Ranks]:
    """Start the other ranks and wait for them.

    Args:
        on_lost: is called on another thread when one of them is lost.
        stop: whether to wait no longer for other hosts.

    Raises:
        StopRequested: instead of waiting.
        RankLostError: instead of an error within the context that came from a lost rank.
        SlipstreamError: another host is not as this one, or the address for them cannot be bound.
    """
    if placement.is_alone:
        yield ALONE
        return
    nodes = placement.nodes
    store = listen(nodes)
    choose_interface(nodes.host)
    facts = facts_of(config) if nodes.count > 1 else {}
    hosts = gather_hosts(store, nodes, placement.num_ranks, facts, stop)
    world, own = hosts[-1].stop, hosts[0][1:]
    with rank_processes(config, placement, own, world, store.port, first_index=1) as processes:
        watch = RankWatch(
            connect(nodes.host, store.port),
            hosts,
            silence_s(config.pipeline.rank_silence_s, nodes.count),
            processes.ended,
            [lambda _: processes.kill(), on_lost],
        )
        watch.start()
        over = ExitCode.RANK_LOST
        try:
            yield ProcessRanks(store, 0, world, torch.device("cuda" if placement.gpus else "cpu"), FOREVER_S)
            over = ExitCode.OK
        except Exception as error:
            watch.explain(error)
            raise
        finally:
            watch.close()
            store.set(OVER, str(int(over)))
            until_heard(store, range(1, nodes.count), within_s=5.0 if watch.lost is None else 1.0)
