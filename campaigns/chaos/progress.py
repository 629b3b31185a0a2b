"""How far a run has come, from the evidence that grows while it runs.

Guarantee: every line is read once, and half a line not before its rest is there.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from campaigns.chaos.evidence import read
from campaigns.chaos.fleet import Daemon


class Progress:
    def __init__(self) -> None:
        self._read_up_to: dict[Path, int] = {}
        self.step = 0  # that the newest trainer ended last
        self.acks = 0
        self.moved_at = 0.0  # when a step or an acknowledgement was last seen

    def look(self, now: float, daemons: Iterable[Daemon]) -> None:
        for daemon in daemons:
            for line in self._fresh_lines(daemon.evidence):
                if line["what"] in ("ack", "step_end"):
                    self.moved_at = now
                    self.acks += line["what"] == "ack"
                    self.step = line.get("step", self.step)

    def _fresh_lines(self, path: Path) -> list[dict[str, object]]:
        begin = self._read_up_to.get(path, 0)
        if not path.exists() or path.stat().st_size <= begin:
            return []
        with path.open("rb") as stream:
            stream.seek(begin)
            whole = stream.read().rpartition(b"\n")[0]
        self._read_up_to[path] = begin + len(whole) + bool(whole)
        return [json.loads(text) for text in whole.splitlines()]


def is_training(daemon: Daemon) -> bool:
    """Whether a trainer has reached its training loop."""
    return any(line["what"] == "start" for line in read(daemon.evidence))
