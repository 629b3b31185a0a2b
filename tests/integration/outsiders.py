"""Runs whose completions come from outside: threads that work at the producer's endpoint, and a producer that is killed in
the middle, which costs nothing that was accepted.
"""

import contextlib
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.integration.pair import Daemon, end_well
from tests.integration.test_pair import read_steps

NUM_STEPS = 8
Work = Callable[[str, threading.Event], None]
"""What an outsider does at an address until the event."""


def address(run_dir: Path) -> str:
    newest = max((run_dir / "serve").glob("*.json"), key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        raise FileNotFoundError("no producer yet")
    return json.loads(newest.read_text())[0]["targets"][0]


class Outsider(threading.Thread):
    """Works; whatever fails, it begins anew at the producer that is there by then."""

    def __init__(self, run_dir: Path, work: Work) -> None:
        super().__init__(daemon=True)
        self._run_dir = run_dir
        self._work = work
        self.over = threading.Event()
        self.failures: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            try:
                self._work(f"http://{address(self._run_dir)}", self.over)
            except (OSError, IndexError, json.JSONDecodeError, httpx.HTTPError, openai.APIError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)


def steps_of_groups(run_dir: Path) -> dict[str, int | None]:
    """The step that trained each group, by its id."""
    with contextlib.closing(sqlite3.connect(f"file:{run_dir}/journal.sqlite?mode=ro", uri=True)) as connection:
        return dict(connection.execute("SELECT lease_id, step FROM groups").fetchall())


def run_through_the_death_of_a_producer(
    folder: Path, config: str, works: Sequence[Work], daemons: list[Daemon]
) -> list[dict[str, Any]]:
    """The lines of steps.jsonl. What was accepted before the kill is in the journal after it, and the run has `NUM_STEPS`."""

    def start(module: str, name: str) -> Daemon:
        daemons.append(Daemon(module, folder / f"{name}.log", "--config", config))
        return daemons[-1]

    outsiders = [Outsider(folder / "run", work) for work in works]
    first, trainer = start("producer.app.cli", "producer-1"), start("consumer.app.cli", "trainer")
    for outsider in outsiders:
        outsider.start()
    try:
        trainer.wait_for(r"step 3/", beside=first)
        first.kill()
        accepted = steps_of_groups(folder / "run")
        end_well(trainer, start("producer.app.cli", "producer-2"))
    finally:
        for outsider in outsiders:
            outsider.over.set()
        for outsider in outsiders:
            outsider.join(40)
    assert any(outsider.failures for outsider in outsiders), "they noticed the kill, and went on"
    lost = accepted.keys() - steps_of_groups(folder / "run").keys()
    assert not lost, lost
    return check_steps(folder)


def check_steps(folder: Path) -> list[dict[str, Any]]:
    steps = read_steps(folder)
    numbers = [line["step"] for line in steps]
    assert numbers == list(range(1, NUM_STEPS + 1)), numbers
    assert steps[-1]["counts"]["trained"] == NUM_STEPS * 4, steps[-1]["counts"]
    trained = Counter(step for step in steps_of_groups(folder / "run").values() if step is not None)
    assert sorted(trained.values()) == [4] * NUM_STEPS, f"each row says the one step that trained it: {trained}"
    return steps


def check_learned(steps: list[dict[str, Any]], reward: str) -> None:
    means = [line[f"rewards/{reward}/mean"] for line in steps]
    assert sum(means[-3:]) > sum(means[:3]), means
