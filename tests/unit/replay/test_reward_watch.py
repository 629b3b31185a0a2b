"""A reward that scores nothing is named, and one that fails for all groups ends the run, however well the others do."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from protocol.config.run import RunConfig
from protocol.errors import DataFailuresError
from protocol.wire.codec import encode
from protocol.wire.messages import MissingReward
from replay.batch_selection import OfferedGroup
from replay.journal.writer import Journal
from replay.watches import RewardWatch, dead_rewards
from tests.unit.replay.builders import SHAPE, buffer, group_message, lease, offer

NAN = np.nan
WORKS, DEAD = ("works", None), ("dead", None)


def noted(watch: RewardWatch, *groups: list[list[float]], reason: str = "", environment: str = "") -> Counter[str]:
    totals: Counter[str] = Counter()
    missing = msgspec.msgpack.encode([MissingReward("dead", reason, "raised\nTypeError: no")]) if reason else b""
    for rewards in groups:
        watch.note(totals, environment, np.array(rewards, np.float32), missing)
    return totals


ONE_IS_DEAD = [[1.0, NAN], [0.0, NAN]]


def test_a_reward_without_any_number_is_dead_until_it_gives_one() -> None:
    watch = RewardWatch((WORKS, DEAD))
    totals = noted(watch, ONE_IS_DEAD, ONE_IS_DEAD)
    assert watch.dead(totals) == {"works": 0, "dead": 2}
    (sentence,) = watch.sentences(totals)
    assert "reward dead gave no number to any completion of all 2 groups" in sentence
    assert "None or NaN" in sentence
    watch.note(totals, "", np.array([[NAN, NAN], [1.0, 0.0]], np.float32), b"")
    assert (dead_rewards(totals), watch.sentences(totals)) == ([], [])


def test_a_group_of_which_nothing_was_scored_counts_for_all_that_should_score_it() -> None:
    watch, totals = RewardWatch((WORKS, ("maze", ["maze"]))), Counter[str]()
    watch.note(totals, "dice", None, b"", "my.py:works raised\nValueError: why")
    assert watch.dead(totals) == {"works": 1, "maze": 0}
    assert "ValueError: why" in watch.sentences(totals)[0]


def test_a_reward_of_other_environments_is_not_dead() -> None:
    config = RunConfig.model_validate({
        "run_dir": "run", "model": {"path": "m"}, "dataset": {"path": "d"},
        "rewards": {"functions": [{"function": "exact_match"}, {"function": "a.py:f", "environments": ["dice"]}]},
        "environments": [{"name": "dice", "factory": "a.py:Dice", "reward_weight": 1.0}],
    })  # fmt: skip
    watch, totals = RewardWatch.of(config), Counter[str]()
    watch.note(totals, "single_turn", np.array([[1.0, NAN, NAN]], np.float32), b"")
    assert watch.dead(totals) == {"exact_match": 0, "f": 0, "dice": 0}
    watch.note(totals, "dice", np.array([[1.0, NAN, NAN]], np.float32), b"")
    assert watch.dead(totals) == {"exact_match": 0, "f": 1, "dice": 1}


@pytest.mark.parametrize(("reason", "max_groups", "ends"), [("raised", 3, True), ("raised", 4, False), ("", 1, False)])
def test_what_fails_for_all_of_the_first_groups_ends_the_run_and_none_does_not(
    reason: str, max_groups: int, ends: bool
) -> None:
    watch = RewardWatch((WORKS, DEAD), max_groups)
    totals = noted(watch, *[ONE_IS_DEAD] * 3, reason=reason)
    if not ends:
        return watch.check(totals)
    with pytest.raises(DataFailuresError, match="TypeError: no") as caught:
        watch.check(totals)
    assert caught.value.exit_code == 66
    totals["reward_scored/dead"] += 1
    return watch.check(totals)


def test_without_a_bound_it_only_warns() -> None:
    watch = RewardWatch((WORKS, DEAD), None)
    watch.check(noted(watch, *[ONE_IS_DEAD] * 2000, reason="raised"))


def test_a_buffer_that_is_full_of_good_groups_ends_all_the_same(journal: Journal) -> None:
    replay = buffer(journal, max_staleness=8)
    replay.rewards = RewardWatch((("only", None),), 2)
    missing = msgspec.msgpack.encode([MissingReward("only", "timeout", "late")])
    for _ in range(2):
        message = group_message(lease(replay), rewards=np.array([NAN, NAN], "<f4").tobytes())
        replay.offer([OfferedGroup(SHAPE.parse(message), encode(message), "p", missing)])
    assert replay.totals["reward_unscored/only"] == 2
    with pytest.raises(DataFailuresError, match="timeout: late"):
        replay.next_batch(0.0)


def test_leases_that_fail_in_scoring_count(journal: Journal) -> None:
    replay = buffer(journal, max_staleness=8)
    replay.rewards = RewardWatch((("only", None),), 2)
    replay.fail(lease(replay), "generation_failed", "no", 0.0)
    replay.fail(lease(replay), "reward_failed", "a.py:only raised", 0.0)
    assert replay.rewards.dead(replay.totals) == {"only": 1}
    offer(replay, lease(replay))
    assert replay.rewards.dead(replay.totals) == {"only": 0}
