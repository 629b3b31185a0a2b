"""The choice of prompts: probabilities by hand, decisions that outlive a kill, and a full disk on which all are asked."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import pytest

from replay.buffer import RolloutBuffer
from replay.lease_ids import Key, LeaseId
from replay.prompt_draws import BLOCK, LEAST, PromptDraws, probability
from replay.prompt_ledger import EpochOrder
from replay.signal_chances import GradedGroup, SignalChances
from replay.sources import ONE, Sources
from tests.unit.replay.builders import FillableJournal, buffer, full_disk, lease, offer, resumed

SIZE = 300


def draws_of(journal: FillableJournal, *, useless: int = 0, groups: int = 98) -> PromptDraws:
    """Prompts are of three sources in turn. Of `useless` sources no group had signal: the chance is 2 / (groups + 2)."""
    draws = PromptDraws(journal, SignalChances(lambda prompt_id: prompt_id % 3), seed=1)
    for source in range(useless):
        for number in range(groups):
            draws.chances.note(GradedGroup(source + 3 * number, "failed", False, 0))
        draws.chances._verdicts.clear()
    return draws


def asked_in(order: EpochOrder, epoch: int) -> list[int]:
    found = []
    while (key := order.next()).epoch == epoch:
        found.append(key.prompt_id)
    return found


def test_a_probability_is_relative_to_the_best_of_the_block_and_at_least_a_tenth() -> None:
    assert probability(0.3, 0.6) == 0.5
    assert probability(0.02, 0.02) == 1.0
    assert probability(0.001, 1.0) == LEAST == 0.1


def test_prompts_are_asked_as_often_as_they_should_and_each_epoch_others(journal: FillableJournal) -> None:
    draws = draws_of(journal, useless=1, groups=4)  # 2 / 6
    order = EpochOrder(3000, 0, shuffle=True, draws=draws)
    asked = asked_in(order, 0)
    counts = Counter(each % 3 for each in asked)
    assert (counts[1], counts[2]) == (1000, 1000)
    assert 280 < counts[0] < 390
    assert order.num_skipped >= 1000 - counts[0]
    assert len(set(asked_in(order, 1)) & set(asked)) < 2000 + 200


def test_of_every_block_the_best_is_asked_and_without_better_ones_all_are(journal: FillableJournal) -> None:
    order = EpochOrder(SIZE, 0, shuffle=False, draws=draws_of(journal, useless=3))
    assert asked_in(order, 0) == list(range(SIZE))


def test_without_draws_every_prompt_is_asked(journal: FillableJournal) -> None:
    assert asked_in(EpochOrder(SIZE, 0, shuffle=False), 0) == list(range(SIZE))


def test_prompts_in_cooldown_are_nobody_s_measure(journal: FillableJournal) -> None:
    order = EpochOrder(SIZE, 0, shuffle=False, draws=draws_of(journal, useless=2))
    for prompt_id in range(2, SIZE, 3):
        order.cool_down(prompt_id, 0)
    assert asked_in(order, 0) == [each for each in range(SIZE) if each % 3 < 2]


def test_a_block_stays_as_it_was_decided_whatever_is_learned_later(journal: FillableJournal) -> None:
    knowing = asked_in(EpochOrder(SIZE, 0, shuffle=True, draws=draws_of(journal, useless=2)), 0)
    assert len(knowing) < SIZE / 2
    assert asked_in(EpochOrder(SIZE, 0, shuffle=True, draws=draws_of(journal)), 0) == knowing


def test_a_state_from_the_middle_of_a_block_goes_on_there(journal: FillableJournal) -> None:
    order = EpochOrder(SIZE, 0, shuffle=True, draws=draws_of(journal, useless=2))
    for _ in range(BLOCK // 3):
        order.next()
    state = json.loads(json.dumps(order.state()))
    again = EpochOrder(SIZE, 0, shuffle=True, draws=draws_of(journal))
    again.restore(state)
    assert asked_in(again, 0) == asked_in(order, 0)
    assert again.num_skipped == order.num_skipped


def test_a_prompt_that_was_not_asked_can_still_be_reached(journal: FillableJournal) -> None:
    order = EpochOrder(SIZE, 0, shuffle=False, draws=draws_of(journal, useless=2))
    skipped = next(each for each in range(SIZE) if each not in asked_in(order, 0))
    again = EpochOrder(SIZE, 0, shuffle=False, draws=draws_of(journal))
    wanted = Key(0, skipped)
    while (key := again.next(wanted)) != wanted:
        assert key.prompt_id < skipped
    assert not again.is_ahead(wanted)


def test_on_a_full_disk_all_are_asked_and_the_next_block_is_decided_again(journal: FillableJournal) -> None:
    order = EpochOrder(SIZE, 0, shuffle=False, draws=draws_of(journal, useless=2))
    with full_disk(journal):
        assert [order.next().prompt_id for _ in range(BLOCK)] == list(range(BLOCK))
    assert journal.drawn(0, 0) is None
    rest = asked_in(order, 0)
    assert len(rest) < (SIZE - BLOCK) / 2
    assert journal.drawn(0, 1) is not None


def answer_some(replay: RolloutBuffer, count: int) -> list[str]:
    """Groups of every third prompt have signal, the others never."""
    given = []
    for _ in range(count):
        given.append(lease(replay))
        prompt_id = LeaseId.parse(given[-1]).key.prompt_id
        offer(replay, given[-1], signal=prompt_id % 3 == 2)
    return given


def test_a_run_that_was_killed_asks_what_it_would_have_asked(journal: FillableJournal, tmp_path: Path) -> None:
    sizes = {"num_prompts": SIZE, "max_staleness": 1000}
    replay = buffer(journal, draws=draws_of(journal), **sizes)
    answer_some(replay, 40)
    state = json.loads(json.dumps(replay.state()))
    answer_some(replay, 90)
    for file in tmp_path.glob("journal.sqlite*"):
        shutil.copy(file, tmp_path / file.name.replace("journal", "copy"))
    after = answer_some(replay, 90)
    assert replay.totals["skipped"] > 30
    copy = FillableJournal(tmp_path / "copy.sqlite")
    try:
        again = resumed(copy, state, 0, session="s", draws=draws_of(copy), **sizes)
        assert answer_some(again, 90) == after
        assert again.totals["skipped"] == replay.totals["skipped"]
        assert again.ledger.order.state() == replay.ledger.order.state()
        assert again.state()["ledger"]["chances"] == replay.state()["ledger"]["chances"]
    finally:
        copy.close()


def test_weights_are_relative_to_the_best_and_the_log_has_those_that_change_by_a_tenth(
    journal: FillableJournal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    draws, sources = (
        PromptDraws(journal, SignalChances(lambda prompt_id: prompt_id // 100), seed=1),
        Sources.of("ab", (100, 100)),
    )
    assert draws.weights(sources) == {}
    for number in range(8):
        draws.chances.note(GradedGroup(number, "failed", False, 0))
    draws.chances.note(GradedGroup(100, "mixed", True, 0))
    found = {"sources/a/by_signal/new": 2 / 10, "sources/b/by_signal/new": 1.0}
    assert draws.weights(sources) == pytest.approx(found)
    [line] = [record.getMessage() for record in caplog.records]
    assert [word for word in ("a/by_signal/new 0.20, was 1.00", "0.0 of 8.0", "0.20", "1.00") if word not in line] == []
    assert "b/" not in line, "it is as it was"
    draws.version = 16  # 4 of 4 and a half: the weights are those of half as many groups
    assert draws.weights(sources)["sources/a/by_signal/new"] == pytest.approx(2 / 6)
    assert len(caplog.records) == 2
    draws.chances.note(GradedGroup(9, "failed", False, 16))
    draws.chances.note(GradedGroup(0, "solved", False, 16))
    assert draws.weights(sources) == pytest.approx(
        {"sources/a/by_signal/new": 2 / 7, "sources/a/by_signal/failed": 2 / 3, "sources/b/by_signal/new": 1.0}
    )
    assert [record.getMessage().count(", was ") for record in caplog.records] == [1, 1, 1]
    assert draws.weights(ONE).keys() == {"by_signal/new", "by_signal/failed"}


def test_a_batch_has_the_weights_of_the_moment(journal: FillableJournal) -> None:
    replay = buffer(journal, draws=draws_of(journal), groups_per_step=1)
    offer(replay, lease(replay), signal=False)
    offer(replay, lease(replay))
    batch = replay.next_batch(0.0)
    assert batch is not None
    assert batch.prompt_weights == {"by_signal/new": 1.0}
