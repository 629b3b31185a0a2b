"""The processes of a host's ranks: started, watched, ended.

Guarantee: none of them outlives the process that started it.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from consumer.ranks.placement import Placement
from consumer.ranks.signs import silence_s
from protocol.config.run import RunConfig
from protocol.runtime.processes import exit_text


class Member(msgspec.Struct, frozen=True):
    """What a rank learns on its standard input."""

    config: msgspec.Raw
    rank: int
    world: int
    host: str
    port: int
    on_gpu: bool
    parent: int
    silence_s: float


class RankProcesses:
    """Ranks of this host, by number."""

    def __init__(self, started: "dict[int, subprocess.Popen[bytes]]") -> None:
        self._started = started

    def ended(self) -> Iterator[tuple[int, str]]:
        """Those that have ended, and how."""
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
    command = [sys.executable, "-P", "-m", "consumer.follower"]
    # In a process group of its own: Ctrl-C is for rank 0 alone, also before this one has learned to ignore it.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | environment, process_group=0)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(msgspec.json.encode(member))
    return process
