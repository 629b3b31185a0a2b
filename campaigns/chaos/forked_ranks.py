"""The other ranks of a trainer, forked before it has threads, so that they need not import its libraries anew.

Guarantee: each runs the real `consumer.app.follower`, as soon as the trainer would have started it, and ends with the trainer.
"""

import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from consumer.ranks import team as processes


class ForkedRank:
    """What `consumer.ranks.team` needs of a `subprocess.Popen`.

    Args:
        before: those that were forked before. Each reads its pipe to the end, so nobody else may hold the end to write to.
    """

    def __init__(self, before: "Sequence[ForkedRank]") -> None:
        read, self._write = os.pipe()
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for rank in (self, *before):
                os.close(rank._write)
            os.dup2(read, 0)
            sys.stdin = os.fdopen(0)
            from consumer.app import follower

            follower.main()
            os._exit(0)
        os.close(read)

    def begin(self, member: processes.Member) -> None:
        with os.fdopen(self._write, "wb") as stream:
            stream.write(msgspec.json.encode(member))

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


def forked_ranks(arguments: list[str]) -> list[ForkedRank]:
    """As many as `--ranks` asks for, without the one that the process itself is, unless it is another host than the first. The
    process will find them in this order."""

    def number(flag: str, default: int) -> int:
        return int(arguments[arguments.index(flag) + 1]) if flag in arguments else default

    others: list[ForkedRank] = []
    for _ in range(number("--ranks", 1) - (number("--node-rank", 0) == 0)):
        others.append(ForkedRank(others))
    waiting = iter(others)

    def start(member: processes.Member, environment: dict[str, str]) -> ForkedRank:
        rank = next(waiting)
        rank.begin(member)
        return rank

    processes.start = start
    return others
