"""The level of a curriculum: moves by hand, open prompts, and a run that was killed and goes on alike."""

import itertools
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from protocol.config.data import CurriculumSection
from replay.buffer import RolloutBuffer
from replay.curriculum import Curriculum
from replay.lease_ids import LeaseId
from replay.prompt_draws import BLOCK, PromptDraws
from replay.prompt_ledger import EpochOrder
from replay.signal_chances import GradedGroup, SignalChances
from tests.unit.replay.builders import FillableJournal, buffer, full_disk, lease, offer, resumed

SIZE = 400
LEVELS = (0, 1, None, 2)  # of the sources, which prompts are of in turn


def curriculum(**settings: Any) -> Curriculum:
    return Curriculum(CurriculumSection(**settings), LEVELS, lambda prompt_id: prompt_id % 4)


def note(level: Curriculum, source: int, scored: int, successes: int, reroll: int = 0) -> int:
    level.note(GradedGroup(source, "mixed", True, 0, scored, successes, reroll))
    return level.now.level


def test_the_level_moves_when_the_window_is_full(caplog: pytest.LogCaptureFixture) -> None:
    level = curriculum(window=3, up=0.5, down=0.25)
    assert math.isnan(level.now.success_rate)
    assert [note(level, 0, 4, 4), note(level, 0, 4, 0)] == [0, 0]
    assert level.now.success_rate == 0.5
    with caplog.at_level(logging.INFO):
        assert note(level, 0, 4, 2) == 1  # 6 of 12
    assert "50.0" in caplog.text
    assert math.isnan(level.now.success_rate)
    # (1, 0, 4) of 12 is 5 / 12; then 4 leaves the window's other end: (0, 4, 1), (4, 1, 0), (1, 0, 0) is 1 / 12
    assert [note(level, 1, 4, each) for each in (1, 0, 4, 1, 0, 0)] == [1, 1, 1, 1, 1, 0]
    for _ in range(9):  # below level 0 there is none
        assert note(level, 0, 4, 0) == 0


def test_only_first_attempts_at_the_level_with_a_score_count() -> None:
    level = curriculum(window=1, up=0.5)
    assert note(level, 1, 4, 4) == note(level, 2, 4, 4) == note(level, 3, 4, 4) == 0
    assert note(level, 0, 4, 4, reroll=1) == note(level, 0, 0, 0) == 0
    assert note(level, 0, 4, 2) == 1
    assert [note(level, 1, 4, 0), note(level, 1, 4, 4), note(level, 3, 4, 4)] == [1, 2, 2]  # `down` is not given


def test_prompts_above_the_level_are_closed_and_those_below_are_rehearsed(journal: FillableJournal) -> None:
    level = curriculum(window=1, up=0.5, rehearse=0.25)
    assert [level.share(each) for each in range(4)] == [1.0, 0.0, 1.0, 0.0]
    note(level, 0, 4, 4)
    assert [level.share(each) for each in range(4)] == [0.25, 1.0, 1.0, 0.0]
    order = EpochOrder(SIZE, 0, shuffle=True, draws=PromptDraws(journal, None, 1, level))
    asked = [key.prompt_id % 4 for key in itertools.takewhile(lambda key: key.epoch == 0, iter(order.next, None))]
    assert (asked.count(1), asked.count(2), asked.count(3)) == (100, 100, 0)
    assert 10 <= asked.count(0) <= 42  # 25 of 100, four deviations around


def test_a_full_disk_opens_no_level(journal: FillableJournal) -> None:
    order = EpochOrder(SIZE, 0, shuffle=False, draws=PromptDraws(journal, None, 1, curriculum()))
    with full_disk(journal):
        assert [order.next().prompt_id for _ in range(BLOCK // 2)] == [each for each in range(BLOCK) if each % 2 == 0]


def test_all_open_prompts_in_cooldown_come_back(journal: FillableJournal) -> None:
    draws = PromptDraws(journal, None, 1, Curriculum(CurriculumSection(), (0, 1), lambda prompt_id: prompt_id % 2))
    order = EpochOrder(SIZE, 0, shuffle=False, draws=draws)
    for prompt_id in range(0, SIZE, 2):
        order.cool_down(prompt_id, 2)
    assert order.next() == (3, 0, 0)


def test_signal_counts_within_what_is_open(journal: FillableJournal) -> None:
    chances = SignalChances(lambda prompt_id: prompt_id % 4)
    draws = PromptDraws(journal, chances, 1, curriculum())
    for _ in range(98):  # of source 0 and 2 alike, so relative to the best that is open all of both are asked
        for source in (0, 2):
            chances.note(GradedGroup(source, "failed", False, 0))
    chances._verdicts.clear()
    order = EpochOrder(SIZE, 0, shuffle=False, draws=draws)
    assert [order.next().prompt_id for _ in range(40)] == [*range(0, 80, 2)]


def answer_some(replay: RolloutBuffer, count: int) -> list[str]:
    """Groups of every prompt succeed half."""
    given = []
    for _ in range(count):
        given.append(lease(replay))
        offer(replay, given[-1], signal=True)
    return given


def test_a_run_that_was_killed_is_at_the_level_at_which_it_was(journal: FillableJournal, tmp_path: Path) -> None:
    sizes = {"num_prompts": SIZE, "max_staleness": 1000}
    settings = {"window": 20, "up": 0.5}
    replay = buffer(journal, draws=PromptDraws(journal, None, 1, curriculum(**settings)), **sizes)
    answer_some(replay, 25)
    state = json.loads(json.dumps(replay.state()))
    answer_some(replay, 45)
    for file in tmp_path.glob("journal.sqlite*"):
        shutil.copy(file, tmp_path / file.name.replace("journal", "copy"))
    level = replay.ledger.draws.curriculum.now.level
    assert level > 0
    after = answer_some(replay, 60)
    assert {LeaseId.parse(each).key.prompt_id % 4 for each in after} == {0, 1, 2, 3}
    copy = FillableJournal(tmp_path / "copy.sqlite")
    try:
        again = resumed(copy, state, 0, session="s", draws=PromptDraws(copy, None, 1, curriculum(**settings)), **sizes)
        assert again.ledger.draws.curriculum.now.level == level
        assert answer_some(again, 60) == after
        assert again.state()["ledger"]["chances"] == replay.state()["ledger"]["chances"]
    finally:
        copy.close()


def test_a_state_of_more_levels_is_the_highest_that_is_left() -> None:
    level = curriculum(window=2)
    level.restore({"level": 7, "window": [[4, 1]]})
    assert level.now == (2, 0.25)
    assert level.state() == {"level": 2, "window": [[4, 1]]}
