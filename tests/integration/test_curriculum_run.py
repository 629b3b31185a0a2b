"""Rows of reasoning-gym whose difficulty rises: both daemons and the reward are real, vLLM is scripted and half right."""

from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from replay.journal.reader import JournalReader
from replay.sources import Sources

from .pair import Daemon, end_well
from .test_pair import read_steps, write_run

pytestmark = pytest.mark.integration

WINDOW, STEPS = 4, 16


def level_by_the_journal(folder: Path) -> int:
    """The level after all groups: half of each succeeds, so it rises with every window of groups at the level."""
    level, count = 0, 0
    with closing(JournalReader(folder / "run" / "journal.sqlite")) as reader:
        sources = Sources.of_facts(reader.facts())
        for row in reader.rows():
            assert (row.num_scored, row.num_successes) == (4, 2), "by reasoning-gym's own score"
            count += sources.number_of(row.prompt_id) == level
            if count == WINDOW and level < 2:
                level, count = level + 1, 0
    return level


def test_difficulty_rises_with_success_and_goes_on_from_there_after_a_kill(
    short_dir: Path, daemons: list[Daemon]
) -> None:
    pytest.importorskip("reasoning_gym")
    config = write_run(
        short_dir, "llama", [], "",
        dataset={
            "path": None,
            "curriculum": {"window": WINDOW, "up": 0.5},
            "sources": [
                {"name": f"level-{level}", "reasoning_gym": "chain_sum", "size": 200, "level": level, "difficulty": level}
                for level in range(3)
            ],
        },
        rewards={"functions": [{"function": "reasoning_gym"}]},
        sampling={"max_completion_length": 64}, engine={"max_model_len": 512},
        pipeline={"groups_per_step": 2, "max_staleness": 1}, trainer={"max_steps": STEPS, "save_steps": 2},
    )  # fmt: skip
    (short_dir / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )

    def start(name: str, *arguments: str) -> Daemon:
        module = {"producer": "tests.integration.sums_producer", "trainer": "consumer.app.cli"}[name]
        daemons.append(Daemon(module, short_dir / f"{name}.log", "--config", str(config), *arguments))
        return daemons[-1]

    producer, trainer = start("producer"), start("trainer")
    trainer.wait_for(r"the level is 1 of 2", beside=producer)
    trainer.kill()
    before = level_by_the_journal(short_dir)
    assert before >= 1
    trainer = start("trainer", "--resume")
    end_well(trainer, producer)

    steps = read_steps(short_dir)
    levels = [step["curriculum/level"] for step in steps]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert levels[-1] == 2 == level_by_the_journal(short_dir)
    assert all(0 <= after - before <= 1 for before, after in pairwise(levels))
    shares = [[step[f"sources/level-{level}/batch_share"] for level in range(3)] for step in steps]
    assert shares[0] == [1.0, 0.0, 0.0], "the first groups are the easiest"
    assert max(hardest for *_, hardest in shares) == 1.0
