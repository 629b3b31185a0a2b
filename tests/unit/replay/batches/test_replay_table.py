"""The replay table against worked numbers and a plain list, and the mistakes that a table must not repeat."""

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pydantic import ValidationError

from protocol.config.sections.learning import ReplaySection
from replay.batches.replay_table import ReplayTable, replay_table
from replay.batches.selectors import (
    DecayedScore,
    Entry,
    LowestScore,
    Prioritized,
    Remover,
    Sampler,
    fifo,
    freshest,
    oldest,
)
from replay.groups import RolloutGroup
from tests.unit.replay.builders import group, names

DECAYED = DecayedScore(4.0)
SAMPLERS: dict[str, Sampler] = {"fifo": fifo, "freshest": freshest, "prioritized": Prioritized(DECAYED)}
REMOVERS: dict[str, Remover] = {"oldest": oldest, "lowest_score": LowestScore(DECAYED)}

every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
every_remover = pytest.mark.parametrize("remover", REMOVERS.values(), ids=REMOVERS)


def table(sampler: Sampler = fifo, remover: Remover = oldest, **changes: int) -> ReplayTable:
    limits = {"max_size": 100, "min_size": 1, "max_times_sampled": 3, "max_age_versions": 16, "seed": 7} | changes
    return ReplayTable(sampler, remover, samples_per_insert=1.0, **limits)


def filled(replay: ReplayTable, *versions_and_scores: tuple[int, float]) -> ReplayTable:
    """Groups g0, g1, ... of these versions and scores."""
    for index, (version, score) in enumerate(versions_and_scores):
        replay.insert(group(f"g{index}", version), score)
    return replay


def picked(replay: ReplayTable, count: int, *, step: int = 0, version: int = 0) -> list[str]:
    return names(replay.pick(count, step=step, version=version))


def kept(replay: ReplayTable) -> list[str]:
    return [group_id for group_id, _, _ in replay.state()]


# Samplers and removers.


def test_the_decayed_score_by_hand() -> None:
    entries = [Entry(group("g", version), score, 1) for version, score in [(0, 8.0), (4, 8.0), (8, 2.0), (12, 0.5)]]
    # At version 12: 8 / 2^3 = 1, 8 / 2^2 = 2, 2 / 2^1 = 1, 0.5 / 2^0 = 0.5.
    assert [2.0 ** (DECAYED.log2(entry) - 12 / 4) for entry in entries] == [1.0, 2.0, 1.0, 0.5]


def test_decayed_scores_are_compared_exactly_for_versions_in_the_millions() -> None:
    score = DecayedScore(3.0)
    start = Entry(group("g", 10_000_000), 4.0, 1)
    half_as_high_three_newer = Entry(group("h", 10_000_003), 2.0, 1)
    assert math.isclose(score.log2(start), score.log2(half_as_high_three_newer), rel_tol=0, abs_tol=1e-8)
    assert score.log2(Entry(group("i", 10_000_003), 2.0 * (1 + 1e-6), 1)) > score.log2(start)
    assert score.log2(Entry(group("j", 10_000_003), 2.0 * (1 - 1e-6), 1)) < score.log2(start)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [(fifo, ["g0", "g1", "g2"]), (freshest, ["g3", "g1", "g4"])],
)
def test_samplers_in_order(sampler: Sampler, expected: list[str]) -> None:
    replay = filled(table(sampler), (1, 1.0), (3, 1.0), (0, 1.0), (3, 1.0), (2, 1.0))
    assert picked(replay, 3, version=3) == expected


def test_removers_by_hand() -> None:
    groups = [(0, 8.0), (4, 2.0), (8, 2.0)]  # at version 8: 2, 1, 2
    assert kept(filled(table(remover=oldest, max_size=2), *groups)) == ["g1", "g2"]
    assert kept(filled(table(remover=LowestScore(DECAYED), max_size=2), *groups)) == ["g0", "g2"]


def test_of_equal_scores_the_one_inserted_first_makes_room() -> None:
    replay = filled(table(remover=LowestScore(DECAYED), max_size=2), (0, 4.0), (4, 2.0), (0, 4.0))
    assert kept(replay) == ["g1", "g2"]


def test_a_newcomer_with_the_lowest_score_does_not_stay() -> None:
    replay = filled(table(remover=LowestScore(DECAYED), max_size=2), (4, 4.0), (4, 4.0), (4, 3.9))
    assert kept(replay) == ["g0", "g1"]


@pytest.mark.long
def test_prioritized_frequencies_follow_the_decayed_scores() -> None:
    """First draws are multinomial: chi-square of 20,000 draws over four groups, 3 degrees of freedom, p = 0.001."""
    replay = filled(table(Prioritized(DECAYED)), (0, 8.0), (4, 12.0), (8, 2.0), (8, 1.0))
    probabilities = np.array([2, 6, 2, 1]) / 11  # decayed to version 8
    draws = 20_000
    counts = Counter(picked(replay, 1, step=step, version=8)[0] for step in range(draws))
    observed = np.array([counts[f"g{index}"] for index in range(4)])
    assert ((observed - draws * probabilities) ** 2 / (draws * probabilities)).sum() < 16.27


@pytest.mark.long
def test_prioritized_pairs_are_drawn_without_replacement() -> None:
    """P(a then b) = p_a p_b / (1 - p_a): scores 3, 2, 1 give 1/2 x 2/3, 1/2 x 1/3, 1/3 x 3/4, ..."""
    replay = filled(table(Prioritized(DECAYED)), (0, 3.0), (0, 2.0), (0, 1.0))
    draws = 12_000
    counts = Counter("".join(picked(replay, 2, step=step)) for step in range(draws))
    expected = {"g0g1": 1 / 3, "g0g2": 1 / 6, "g1g0": 1 / 4, "g1g2": 1 / 12, "g2g0": 1 / 10, "g2g1": 1 / 15}
    assert set(counts) == set(expected)
    chi_square = sum((counts[pair] - draws * p) ** 2 / (draws * p) for pair, p in expected.items())
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_prioritized_goes_on_when_scores_have_decayed_to_nothing() -> None:
    replay = filled(table(Prioritized(DecayedScore(0.001)), max_age_versions=10**9), (0, 1.0), (10**6, 1.0), (0, 1.0))
    chosen = picked(replay, 3, version=10**6)
    assert chosen[0] == "g1"
    assert sorted(chosen) == ["g0", "g1", "g2"]


# Contents.


@pytest.mark.parametrize("score", [0.0, -1.0, math.nan, math.inf])
def test_a_score_that_is_no_positive_number_is_not_kept(score: float) -> None:
    assert len(filled(table(), (0, score))) == 0


@every_sampler
def test_none_is_replayed_beyond_its_age(sampler: Sampler) -> None:
    replay = filled(table(sampler, max_age_versions=2), (0, 9.0), (1, 1.0), (2, 1.0), (3, 1.0))
    assert sorted(picked(replay, 9, version=3)) == ["g1", "g2", "g3"]
    assert sorted(picked(replay, 9, version=5)) == ["g3"]
    assert picked(replay, 9, version=6) == []
    assert len(replay) == 4, "pick takes nothing away"
    replay.expire(4)
    assert kept(replay) == ["g2", "g3"]


def test_groups_that_are_too_old_do_not_count_towards_the_least_size() -> None:
    replay = filled(table(min_size=2, max_age_versions=2), (0, 1.0), (3, 1.0))
    assert picked(replay, 9, version=2) == ["g0", "g1"]
    assert picked(replay, 9, version=3) == []


@every_sampler
def test_a_pick_depends_on_contents_seed_and_step_alone(sampler: Sampler) -> None:
    groups = [(version, 1.0 + version % 3) for version in range(12)]
    replay = filled(table(sampler), *groups)
    first = picked(replay, 4, step=5, version=12)
    picked(replay, 9, step=6, version=12)
    assert picked(replay, 4, step=5, version=12) == first
    assert picked(filled(table(sampler), *groups), 4, step=5, version=12) == first


def test_another_seed_or_step_draws_others() -> None:
    replay, other = (filled(table(Prioritized(DECAYED), seed=seed), *[(0, 1.0)] * 50) for seed in (1, 2))
    assert picked(replay, 10, step=1) != picked(replay, 10, step=2)
    assert picked(replay, 10, step=1) != picked(other, 10, step=1)


@every_sampler
@every_remover
def test_a_restored_table_goes_on_as_the_one_it_came_from(sampler: Sampler, remover: Remover) -> None:
    groups = {f"g{index}": group(f"g{index}", index // 3) for index in range(30)}
    original, restored = table(sampler, remover, max_size=20), table(sampler, remover, max_size=20)
    for index, candidate in enumerate(groups.values()):
        original.insert(candidate, 0.1 * (index % 7 + 1))
    original.sampled(picked(original, 5, version=9))
    restored.insert(group("of before"), 1.0)
    restored.restore(original.state(), groups)
    assert restored.state() == original.state()
    for step in range(5):
        chosen = picked(original, 4, step=step, version=9)
        assert picked(restored, 4, step=step, version=9) == chosen
        for replay in (original, restored):
            replay.sampled(chosen)
            replay.insert(group(f"new-{step}", 10), 0.3)
        assert restored.state() == original.state()


def test_a_restore_skips_what_is_missing_and_what_the_limits_do_not_allow() -> None:
    groups = {name: group(name) for name in "acde"}
    replay = table(max_times_sampled=2, max_size=2)
    replay.restore([["a", 1, 1.0], ["b", 1, 1.0], ["c", 2, 1.0], ["d", 1, 1.0], ["e", 1, 1.0]], groups)
    assert replay.state() == [["d", 1, 1.0], ["e", 1, 1.0]]


# The mistake of a heap of (score, group): once it holds the best scores there are, nothing gets in.


def rollouts(seed: int) -> list[tuple[int, float]]:
    """Version and score of 2,000 rollouts of eight binary rewards each, sixteen a version."""
    rewards = np.random.default_rng(seed).integers(0, 2, size=(2000, 8))
    scores = np.abs(rewards - rewards.mean(axis=1, keepdims=True)).sum(axis=1)
    return [(index // 16, float(score)) for index, score in enumerate(scores)]


@every_remover
@pytest.mark.parametrize("seed", range(3))
def test_the_replay_heap_freezes_on_the_earliest_data(remover: Remover, seed: int) -> None:
    """Here it does not, even where no group is ever too old. 64 groups are four versions' worth, and the highest score, 4,
    outweighs the lowest, 1.75, for 4.8 versions more."""
    replay = filled(table(remover=remover, max_size=64, max_age_versions=10**6), *rollouts(seed))
    ages = [1999 // 16 - int(group_id[1:]) // 16 for group_id in kept(replay)]
    assert len(ages) == 64
    assert max(ages) <= 9
    assert sum(ages) / 64 <= 4


def test_a_plain_heap_would_have_frozen() -> None:
    """The same rollouts in a heap without decay, so that the test above proves something."""
    heap: list[tuple[float, int]] = []
    for version, score in rollouts(0):
        if len(heap) < 64:
            heapq.heappush(heap, (score, version))
        elif score > heap[0][0]:
            heapq.heapreplace(heap, (score, version))
    assert max(version for _, version in heap) < 30


# Against a plain list.


@dataclass
class Row:
    group: RolloutGroup
    score: float
    uses: int


class AgainstAList(RuleBasedStateMachine):
    """Every operation on the table and on a list; they hold the same, and a pick keeps its promises."""

    MAX_SIZE, MAX_USES, MAX_AGE, MIN_SIZE = 5, 3, 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.remover_name = "oldest"
        self.replay = self.make()
        self.rows: list[Row] = []
        self.version = 0
        self.uses: Counter[str] = Counter()

    def make(self) -> ReplayTable:
        return table(
            Prioritized(DECAYED), REMOVERS[self.remover_name], min_size=self.MIN_SIZE, max_size=self.MAX_SIZE,
            max_times_sampled=self.MAX_USES, max_age_versions=self.MAX_AGE,
        )  # fmt: skip

    @rule(name=st.integers(0, 30), behind=st.integers(0, 5), score=st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.0]))
    def insert(self, name: int, behind: int, score: float) -> None:
        group_id = f"{name}"
        newcomer = group(group_id, max(0, self.version - behind))
        self.replay.insert(newcomer, score)
        if score <= 0 or any(row.group.group_id == group_id for row in self.rows):
            return
        self.uses[group_id] = 1
        self.rows.append(Row(newcomer, score, 1))
        if len(self.rows) > self.MAX_SIZE:
            decayed = [row.score * 0.5 ** ((self.version - row.group.policy_version) / 4) for row in self.rows]
            self.rows.pop(decayed.index(min(decayed)) if self.remover_name == "lowest_score" else 0)

    @rule(count=st.integers(0, 6), step=st.integers(0, 99))
    def train(self, count: int, step: int) -> None:
        chosen = picked(self.replay, count, step=step, version=self.version)
        usable = [r.group.group_id for r in self.rows if self.version - r.group.policy_version <= self.MAX_AGE]
        assert len(chosen) == len(set(chosen)) == (min(count, len(usable)) if len(usable) >= self.MIN_SIZE else 0)
        assert set(chosen) <= set(usable)
        self.replay.sampled(chosen)
        self.uses.update(chosen)
        for row in self.rows:
            row.uses += row.group.group_id in chosen
        self.rows = [row for row in self.rows if row.uses < self.MAX_USES]

    @rule(by=st.integers(0, 3))
    def publish(self, by: int) -> None:
        self.version += by
        young = [row for row in self.rows if self.version - row.group.policy_version <= self.MAX_AGE]
        self.replay.expire(self.version)
        self.rows = young

    @rule(lost=st.sets(st.integers(0, 30)), remover_name=st.sampled_from(sorted(REMOVERS)))
    def restart(self, lost: set[int], remover_name: str) -> None:
        self.remover_name = remover_name
        state, self.replay = self.replay.state(), self.make()
        self.rows = [row for row in self.rows if int(row.group.group_id) not in lost]
        self.replay.restore(state, {row.group.group_id: row.group for row in self.rows})

    @invariant()
    def both_hold_the_same(self) -> None:
        assert self.replay.state() == [[row.group.group_id, row.uses, row.score] for row in self.rows]
        assert len(self.replay) == len(self.rows) <= self.MAX_SIZE
        assert max(self.uses.values(), default=0) <= self.MAX_USES


AgainstAList.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_the_table_behaves_as_a_plain_list = pytest.mark.long(AgainstAList.TestCase)


# From the configuration.


def section(**changes: Any) -> ReplaySection:
    return ReplaySection(**({"mode": "signal", "min_size": 1} | changes))


def test_no_table_when_every_group_is_trained_once() -> None:
    assert replay_table(section(mode="fifo"), seed=1) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sampler": "fifo"}, [["g2", "g3", "g4"], ["g2", "g3", "g4"]]),
        ({"sampler": "freshest"}, [["g4", "g3", "g2"], ["g4", "g3", "g2"]]),
        ({"sampler": "freshest", "remover": "lowest_score", "half_life_versions": 1.0}, [["g4", "g3", "g0"]] * 2),
        ({"sampler": "fifo", "max_age_versions": 1}, [["g3", "g4"]] * 2),
        ({"sampler": "fifo", "min_size": 3, "max_age_versions": 1}, [[], []]),
        ({"sampler": "fifo", "max_times_sampled": 2}, [["g2", "g3", "g4"], []]),
    ],
)
def test_every_setting_arrives(changes: dict[str, Any], expected: list[list[str]]) -> None:
    replay = replay_table(section(max_size=3, remover="oldest").model_copy(update=changes), seed=1)
    assert replay is not None
    assert replay.samples_per_insert == 1.0
    # with a half-life of one version: 64, 2, 4, 8, 16 at version 4
    filled(replay, (0, 1024.0), (1, 16.0), (2, 16.0), (3, 16.0), (4, 16.0))
    for chosen in expected:
        assert picked(replay, 9, version=4) == chosen
        replay.sampled(chosen)


def test_the_seed_arrives() -> None:
    draws = []
    for seed in (1, 1, 2):
        replay = replay_table(section(), seed)
        assert replay is not None
        draws.append(picked(filled(replay, *[(0, 1.0)] * 50), 10))
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    "changes", [{"half_life_versions": 1e-4}, {"samples_per_insert": 1e7}, {"max_times_sampled": 1}]
)
def test_a_table_that_would_never_be_sampled_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        section(**changes)
