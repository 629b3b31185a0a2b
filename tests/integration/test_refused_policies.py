"""Runs of both daemons whose producers refuse policies, and how they end and go on."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pair import Daemon
from tests.integration.runs import Run, eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FOREVER = 10**6


class Pair:
    """A run, and producers each of which refuses what a file of its name says."""

    def __init__(self, start: Any, folder: Path, daemons: list[Daemon], **sections: Any) -> None:
        self.folder, self.daemons = folder, daemons
        reward = "def reward(completions, **_):\n    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
        (folder / "rewards.py").write_text(reward)
        functions = {"functions": [{"function": f"{folder}/rewards.py:reward"}], "num_workers": 1}
        self.run: Run = start(rewards=functions, **sections)

    def refuse(self, name: str, first: int, last: int = FOREVER) -> None:
        written = self.folder / f"{name}.written"
        written.write_text(f"{first} {last}")
        written.replace(self.folder / f"{name}.refuses")  # at once, because a producer may be reading it

    def repair(self, name: str) -> None:
        (self.folder / f"{name}.refuses").unlink()

    def producer(self, name: str) -> Daemon:
        daemon = Daemon(
            "tests.integration.refusing_producer", self.folder / f"{name}.log", "--config", str(self.run.config_file),
            variables={"REFUSES": str(self.folder / f"{name}.refuses")},
        )  # fmt: skip
        self.daemons.append(daemon)
        return daemon


def test_a_first_policy_that_is_refused_ends_both_at_once_and_the_run_goes_on_when_it_is_repaired(
    start: Any, short_dir: Path, daemons: list[Daemon]
) -> None:
    pair = Pair(start, short_dir, daemons)
    pair.refuse("p", 0)
    trainer, producer = pair.run.trainer(), pair.producer("p")
    producer.wait_for("v0 is refused, no version is served yet: rank 512 is too large")
    assert trainer.end(20) == 81, trainer.output[-3000:]
    assert producer.end(20) == 81, producer.output[-3000:]
    told = r"and none serves any version: \S+, which serves none, refuses v0: rank 512 is too large\. Repair"
    assert re.search(told, trainer.output)
    assert "no policy version is served here: v0 is refused: rank 512 is too large. Repair" in producer.output

    pair.repair("p")
    trainer, producer = pair.run.trainer("--resume"), pair.producer("p")
    assert trainer.end(100) == 0, trainer.output[-3000:]
    assert producer.end() == 0
    assert pair.run.column("step") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("staleness", "refused", "why"),
    [
        (0, 1, r"groups of v2 are too old to be trained .pipeline.max_staleness.: \S+, which serves v2, refuses v3"),
        (1, 2, r"groups of v2 are too old to be trained .pipeline.max_staleness.: \S+, which serves v2, refuses v4"),
        (8, 2, r"\d+ versions in a row .swap.max_refused.: \S+, which serves v2, refuses v\d+"),
    ],
)
def test_later_policies_that_are_refused_end_the_trainer_alone_which_goes_on_from_there_without_a_loss(
    start: Any, short_dir: Path, daemons: list[Daemon], staleness: int, refused: int, why: str
) -> None:
    swap = {"max_refused": 2 if staleness == 8 else 3}
    pair = Pair(start, short_dir, daemons, swap=swap, pipeline={"max_staleness": staleness}, trainer={"max_steps": 30})
    pair.refuse("p", 3)
    trainer, producer = pair.run.trainer("--set", "trainer.save_steps=100"), pair.producer("p")
    producer.wait_for("v3 is refused, v2 stays: rank 512 is too large")
    assert trainer.end(60) == 81, trainer.output[-3000:]
    assert re.search(why, trainer.output), trainer.output[-3000:]
    assert producer.process.poll() is None, "it serves v2, and waits"
    last = pair.run.steps[-1]["step"]
    assert last >= 2 + refused
    assert pair.run.checkpoint(last).exists(), "what was trained is kept"

    pair.repair("p")
    trainer = pair.run.trainer("--resume", "--set", f"trainer.max_steps={last + 4}")
    assert trainer.end(100) == 0, trainer.output[-3000:]
    assert producer.end() == 0
    assert pair.run.column("step") == list(range(1, last + 5))


def test_what_one_of_two_producers_refuses_ends_nothing(start: Any, short_dir: Path, daemons: list[Daemon]) -> None:
    pair = Pair(
        start,
        short_dir,
        daemons,
        swap={"max_refused": 2},
        pipeline={"max_staleness": 0},
        trainer={"max_steps": FOREVER},
    )
    trainer, bad, good = pair.run.trainer(), pair.producer("bad"), pair.producer("good")
    for producer in (bad, good):
        producer.wait_for(r"v\d+ is live")
    pair.refuse("bad", 0)
    trainer.wait_for("refuses policy v")
    before = len(pair.run.steps)
    eventually(lambda: len(pair.run.steps) > before + 5)
    assert bad.output.count("is refused") > 2
    assert [each.process.poll() for each in (trainer, bad, good)] == [None, None, None]


def test_a_producer_that_never_served_a_version_ends_beside_one_that_does(
    start: Any, short_dir: Path, daemons: list[Daemon]
) -> None:
    pair = Pair(start, short_dir, daemons, trainer={"max_steps": FOREVER})
    pair.refuse("bad", 0)
    trainer, good = pair.run.trainer(), pair.producer("good")
    good.wait_for(r"v[1-9]\d* is live")
    bad = pair.producer("bad")
    assert bad.end(60) == 81, bad.output[-3000:]
    assert "no policy version is served here, and 3 in a row were refused (swap.max_refused)" in bad.output
    before = len(pair.run.steps)
    eventually(lambda: len(pair.run.steps) > before + 2)
    assert trainer.process.poll() is None


def test_versions_that_are_refused_in_between_end_nothing(start: Any, short_dir: Path, daemons: list[Daemon]) -> None:
    pair = Pair(
        start, short_dir, daemons, swap={"max_refused": 4}, pipeline={"max_staleness": 3}, trainer={"max_steps": 10}
    )
    pair.refuse("p", 2, 4)
    trainer, producer = pair.run.trainer(), pair.producer("p")
    assert trainer.end(100) == 0, trainer.output[-3000:]
    assert producer.end() == 0
    assert re.search(r"v[234] is refused, v[01] stays", producer.output)
    assert re.search(r"v([5-9]|10) is live", producer.output)
    assert pair.run.column("step") == list(range(1, 11))
