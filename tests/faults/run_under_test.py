"""One run with real daemons whose surroundings the tests break, and what must be true of it afterwards.

Guarantee: whatever a run started is gone when its `ExitStack` closes.
"""

import json
import math
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from protocol.config.loader import load_config
from protocol.runtime import json_lines as rotated_lines
from replay.journal.reader import JournalReader
from tests.integration.pair import Daemon
from tests.integration.runs import eventually

RECOVERY_S = 15.0
FINISH_S = 150.0
"""For the steps that are left, dozens of them, on a machine that has other work."""
HEARTBEAT_TIMEOUT_S = 1.5
_ANSWERED = {"accepted", "no_signal", "duplicate"}


class Acknowledged(NamedTuple):
    at: float  # Unix time
    lease_id: str
    outcome: str


class Run:
    """A run directory with one trainer and any number of producers, all in the network namespace `network` if there is one. In
    `folder` are logs and everything else that tests write."""

    def __init__(
        self, stack: ExitStack, folder: Path, model: Path, network: Path | None = None, **sections: Any
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._network = network
        rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(2000)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "rewards.py").write_text("def reward(completions, **_):\n    return [0.0, 1.0, 0.5, 0.25]\n")
        values: dict[str, Any] = {
            "run_dir": str(folder / "run"),
            "model": {"path": str(model), "dtype": "float32"},
            "dataset": {"path": str(folder / "train.jsonl")},
            "rewards": {"functions": [{"function": f"{folder}/rewards.py:reward"}], "num_workers": 1},
            "sampling": {"num_generations": 4, "max_completion_length": 48},
            "pipeline": {"groups_per_step": 2, "max_staleness": 3, "fill": "full"},
            "replay": {"keep_all": True},
            "transport": {"heartbeat_interval_s": 0.3, "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S},
            "lora": {"r": 4, "lora_alpha": 8},
            "trainer": {"max_steps": 60, "gradient_checkpointing": False},
        }
        for name, section in sections.items():
            values[name] = values[name] | section if isinstance(section, dict) else section
        self._config_file = folder / "run.yaml"
        self._config_file.write_text(yaml.safe_dump(values))
        self.config = load_config(str(self._config_file))
        self.pace(0.2)

    def pace(self, seconds: float) -> None:
        """How long a group takes from now on."""
        partial = self._folder / "pace.partial"
        partial.write_text(str(seconds))
        partial.replace(self._folder / "pace")

    def trainer(self, *arguments: str, module: str = "consumer.app.cli", **variables: str) -> Daemon:
        return self._start(module, "trainer", *arguments, **variables)

    def producer(self, name: str = "producer") -> Daemon:
        """Its own files are not in the run directory."""
        files = {"STAND_IN_PACE": str(self._folder / "pace"), "STAND_IN_NEWS": str(self._folder / f"{name}.news")}
        arguments = ("--set", f"run_dir={self._folder / name}")
        return self._start("tests.faults.stand_in_producer", name, *arguments, **files)

    def _start(self, module: str, name: str, *arguments: str, **variables: str) -> Daemon:
        arguments = ("--config", str(self._config_file), *arguments)
        process = Daemon(module, self._folder / f"{name}.log", *arguments, variables=variables, network=self._network)
        self._stack.callback(process.kill)
        return process

    def finish(self, trainer: Daemon, *producers: Daemon) -> None:
        """To the last step, as fast as it goes; then everything must be right."""
        self.pace(0.0)
        assert [daemon.end(FINISH_S) for daemon in (trainer, *producers)] == [0] * (1 + len(producers))
        assert self.step == self.config.trainer["max_steps"]
        self.check(self.step)

    def _news(self) -> list[Acknowledged]:
        lines = [line for file in self._folder.glob("*.news") for line in file.read_text().splitlines(keepends=True)]
        return sorted(Acknowledged(*json.loads(line)) for line in lines if line.endswith("\n"))

    @property
    def acks(self) -> list[Acknowledged]:
        """In order of time."""
        return [one for one in self._news() if one.outcome != "leased"]

    @property
    def step(self) -> int:
        """Steps taken, by the last line of steps.jsonl."""
        file = Path(self.config.run_dir) / "steps.jsonl"
        lines = rotated_lines.read(file)
        return int(lines[-1]["step"]) if lines else 0

    def wait_for_step(self, number: int, timeout_s: float = 90.0) -> None:
        eventually(lambda: self.step >= number, timeout_s)

    def recovers(self, since: float) -> None:
        """Soon after `since` (Unix time) a group is acknowledged that was leased after it, too."""

        def recovered_at() -> float | None:
            fresh = {one.lease_id for one in self._news() if one.outcome == "leased" and one.at > since}
            return next((ack.at for ack in self.acks if ack.lease_id in fresh), None)

        eventually(recovered_at, RECOVERY_S + 5)
        took = (recovered_at() or math.inf) - since
        print(f"recovered within {took:.2f} s")
        assert took < RECOVERY_S

    def check(self, trained_steps: int) -> None:
        """Nothing that was acknowledged is missing, and every step trained other groups than all the others."""
        with closing(JournalReader(self.config.journal_file)) as journal:
            assert journal.database_problems() == []
            rows = {row.lease_id: row for row in journal.rows()}
            assert len(journal.frames(rows)) == len(rows)
            batches = list(journal.batches())
        acks = self.acks
        assert {ack.outcome for ack in acks} <= _ANSWERED | {"stale"}
        keys = {g: (row.epoch, row.prompt_id, row.reroll) for g, row in rows.items()}
        accepted = {keys[g] for g in rows if rows[g].outcome == "accepted"}
        for ack in acks:
            if ack.outcome != "duplicate":
                assert ack.lease_id in rows, f"{ack.lease_id} was acknowledged and is lost"
                assert rows[ack.lease_id].outcome == ack.outcome
        assert [batch.step for batch in batches[:trained_steps]] == list(range(1, trained_steps + 1))
        trained = [lease_id for batch in batches for lease_id in batch.lease_ids]
        assert all(len(batch.lease_ids) == self.config.pipeline.groups_per_step for batch in batches)
        assert len(trained) == len(set(trained))
        trained_prompts = Counter(keys[g] for g in trained)
        assert max(trained_prompts.values()) == 1, "a prompt was trained twice in an epoch"
        assert set(trained_prompts) <= accepted
        left = {rows[g].state for g in set(rows) - set(trained)}
        assert left <= {"ready", "no_signal", "stale"}
