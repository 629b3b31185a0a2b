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
    assert trainer.end() == 81, trainer.output[-3000:]
    assert producer.end() == 81, producer.output[-3000:]
    told = r"and none serves any version: \S+, which serves none, refuses v0: rank 512 is too large\. Repair"
    assert re.search(told, trainer.output)
    assert "no policy version is served here: v0 is refused: rank 512 is too large. Repair" in producer.output

    pair.repair("p")
    trainer, producer = pair.run.trainer("--resume"), pair.producer("p")
    assert trainer.end(100) == 0, trainer.output[-3000:]
    assert producer.end() == 0
    assert pair.run.column("step") == [1, 2, 3, 4, 5, 6]


TOO_OLD = "groups of v{served} are too old to be trained .pipeline.max_staleness."


@pytest.mark.parametrize(
    ("staleness", "least", "why"),
    [(0, 3, TOO_OLD), (1, 3, TOO_OLD), (8, 4, r"\d+ versions in a row .swap.max_refused.")],
)
def test_later_policies_that_are_refused_end_the_trainer_alone_which_goes_on_from_there_without_a_loss(
    start: Any, short_dir: Path, daemons: list[Daemon], staleness: int, least: int, why: str
) -> None:
    """A producer takes the newest policy. With staleness the trainer may be versions ahead of one that is slow."""
    swap = {"max_refused": 2 if staleness == 8 else 3}
    pair = Pair(start, short_dir, daemons, swap=swap, pipeline={"max_staleness": staleness}, trainer={"max_steps": 30})
    pair.refuse("p", 3)
    trainer, producer = pair.run.trainer("--set", "trainer.save_steps=100"), pair.producer("p")
    stays = r"v\d+ is refused, v(\d+) stays: rank 512 is too large"
    served = int(producer.wait_for(stays if staleness else "v3 is refused, v(2) stays: rank 512 is too large")[1])
    assert trainer.end() == 81, trainer.output[-3000:]
    told = rf"{why.format(served=served)}: \S+, which serves v{served}, refuses v(\d+)"
    assert (found := re.search(told, trainer.output)), trainer.output[-3000:]
    assert producer.process.poll() is None, "it serves what it served, and waits"
    last = pair.run.steps[-1]["step"]
    assert last >= int(found[1]) >= least
    if why == TOO_OLD:
        assert last == served + staleness + 1, "as many steps as the groups of that version could be trained in"
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
    eventually(lambda: bad.output.count("is refused") > 2)
    assert [each.process.poll() for each in (trainer, bad, good)] == [None, None, None]


def test_a_producer_that_never_served_a_version_ends_beside_one_that_does(
    start: Any, short_dir: Path, daemons: list[Daemon]
) -> None:
    pair = Pair(start, short_dir, daemons, trainer={"max_steps": FOREVER})
    pair.refuse("bad", 0)
    trainer, good = pair.run.trainer(), pair.producer("good")
    good.wait_for(r"v[1-9]\d* is live")
    bad = pair.producer("bad")
    assert bad.end(120) == 81, bad.output[-3000:]
    assert "no policy version is served here, and 3 in a row were refused (swap.max_refused)" in bad.output
    before = len(pair.run.steps)
    eventually(lambda: len(pair.run.steps) > before + 2)
    assert trainer.process.poll() is None


def test_versions_that_are_refused_in_between_end_nothing(start: Any, short_dir: Path, daemons: list[Daemon]) -> None:
    """The groups of the first version can be trained until the first one that is not refused, so that a producer which is slow,
    and has the newest of several versions only, ends nothing either."""
    pair = Pair(
        start, short_dir, daemons, swap={"max_refused": 6}, pipeline={"max_staleness": 6}, trainer={"max_steps": 10}
    )
    pair.refuse("p", 1, 5)
    trainer, producer = pair.run.trainer(), pair.producer("p")
    assert trainer.end(100) == 0, trainer.output[-3000:]
    assert producer.end() == 0
    assert re.search(r"v[1-5] is refused, v0 stays", producer.output)
    assert re.search(r"v([6-9]|10) is live", producer.output)
    assert pair.run.column("step") == list(range(1, 11))
