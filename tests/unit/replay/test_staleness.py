"""The budget against tables worked by hand, and the bound itself in a simulated pipeline."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.journal.writer import Journal
from replay.staleness import StalenessBudget
from tests.unit.replay.builders import buffer, memory_folder, offer


@pytest.mark.parametrize(
    ("max_staleness", "sync_interval", "num_iterations", "next_step", "floors"),
    [
        # floors[q]: the oldest version that may generate one more group while q are pending; two groups a step.
        # On-policy: the first batch wants v(s), the next v(s + 1), and so on.
        (0, 1, 1, 0, [0, 0, 1, 1, 2, 2]),
        (0, 1, 1, 5, [5, 5, 6, 6, 7, 7]),
        (1, 1, 1, 5, [4, 4, 5, 5, 6, 6]),
        (2, 1, 1, 5, [3, 3, 4, 4, 5, 5]),
        (2, 1, 1, 0, [0, 0, 0, 0, 0, 0, 1, 1]),  # never below version 0
        # A version every two steps: steps 4 and 5 start from v2, 6 and 7 from v3.
        (0, 2, 1, 4, [2, 2, 2, 2, 3, 3, 3, 3, 4]),
        (0, 2, 1, 5, [2, 2, 3, 3, 3, 3, 4]),
        (1, 2, 1, 5, [1, 1, 2, 2, 2, 2, 3]),
        (2, 2, 1, 5, [0, 0, 1, 1, 1, 1, 2]),
        # Every batch is trained for two steps: the batches are cut at steps 4, 6, 8.
        (0, 1, 2, 4, [4, 4, 6, 6, 8, 8]),
        (1, 1, 2, 4, [3, 3, 5, 5, 7, 7]),
        (2, 1, 2, 4, [2, 2, 4, 4, 6, 6]),
        # Both: cut at steps 4, 6, 8 under v2, v3, v4.
        (0, 2, 2, 4, [2, 2, 3, 3, 4, 4]),
        (1, 2, 2, 4, [1, 1, 2, 2, 3, 3]),
        # A version every three steps, two steps a batch: cut at 3, 5, 7, 9 under v1, v1, v2, v3.
        (0, 3, 2, 3, [1, 1, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_floors_by_hand(
    max_staleness: int, sync_interval: int, num_iterations: int, next_step: int, floors: list[int]
) -> None:
    budget = StalenessBudget(2, max_staleness, sync_interval, num_iterations)
    assert [budget.floor(pending, next_step) for pending in range(len(floors))] == floors


def test_versions_by_hand() -> None:
    assert [StalenessBudget(1, 0, 3).version_at(step) for step in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [StalenessBudget(1, 2, 2).oldest_usable(step) for step in range(8)] == [-2, -2, -1, -1, 0, 0, 1, 1]


@given(
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    version=st.integers(0, 20),
    trained=st.integers(0, 200),
    pending=st.integers(0, 200),
)
def test_for_one_iteration_and_every_step_it_is_the_bound_of_areal(
    groups_per_step: int, max_staleness: int, version: int, trained: int, pending: int
) -> None:
    """AReaL, eq. 3, counts samples from 1: ceil(N / B) - 1 <= version + eta, N of them submitted since the start."""
    trained -= trained % groups_per_step
    next_step = trained // groups_per_step
    budget = StalenessBudget(groups_per_step, max_staleness)
    admitted = budget.floor(pending, next_step) <= version
    assert admitted == (trained + pending + 1 <= (max_staleness + version + 1) * groups_per_step)


@pytest.mark.long
@settings(max_examples=75)
@given(
    groups_per_step=st.sampled_from([1, 2, 3, 4, 9]),
    max_staleness=st.integers(0, 3),
    sync_interval=st.integers(1, 3),
    num_iterations=st.integers(1, 3),
    sampled=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_in_order_groups_are_never_too_old_and_the_pipeline_never_stands_still(
    groups_per_step: int, max_staleness: int, sync_interval: int, num_iterations: int, sampled: bool, seed: int
) -> None:
    """Producers learn of versions late and finish whenever they like, but in the order of the leases."""
    with memory_folder() as folder, contextlib.closing(Journal(folder / "journal")) as journal:
        simulate(journal, StalenessBudget(groups_per_step, max_staleness, sync_interval, num_iterations), sampled, seed)


def simulate(journal: Journal, budget: StalenessBudget, sampled: bool, seed: int) -> None:
    draw = random.Random(seed)
    replay = buffer(
        journal,
        groups_per_step=budget.groups_per_step,
        max_staleness=budget.max_staleness,
        sync_interval=budget.sync_interval,
        num_iterations=budget.num_iterations,
        sampled=sampled,
    )
    share = draw.choice([0.1, 0.5, 0.8])
    step = published = known = num_batches = 0
    waiting: list[tuple[str, int]] = []  # leases not begun: id, floor
    begun: list[tuple[str, int]] = []  # in generation: id, version
    ages = []
    for _ in range(300):
        match draw.choice(["lease", "lease", "learn", "begin", "begin", "finish", "finish", "train"]):
            case "lease":
                record = replay.lease("p", now=0.0, timeout_s=1e9)
                if record is not None:
                    assert record.policy_floor <= published
                    waiting.append((record.lease_id, record.policy_floor))
            case "learn":
                known = draw.randint(known, published)
            case "begin" if waiting and waiting[0][1] <= known:
                begun.append((waiting.pop(0)[0], known))
            case "finish" if begun:
                lease_id, version = begun.pop(0)
                outcome = offer(replay, lease_id, version, signal=draw.random() < share)
                assert outcome in ("accepted", "no_signal")
            case "train":
                batch = replay.next_batch(0.0)
                if batch is None:
                    continue
                assert batch.first_step == step + 1
                ages += [budget.version_at(step) - g.policy_version for g in batch.groups]
                num_batches += 1
                for _ in range(budget.num_iterations):
                    step += 1
                    if step % budget.sync_interval == 0:
                        published = budget.version_at(step)
                        replay.published(published)
    assert replay.totals["went_stale"] == replay.totals["stale"] == 0
    assert all(0 <= age <= budget.max_staleness for age in ages)
    while replay.next_batch(0.0) is None:  # whatever the state, task can be had until the next batch is full
        record = replay.lease("p", now=0.0, timeout_s=1e9)
        if record is not None:
            waiting.append((record.lease_id, record.policy_floor))
        known = published
        begun += [(lease_id, known) for lease_id, floor in waiting if floor <= known]
        waiting = [entry for entry in waiting if entry[1] > known]
        assert begun, "nothing to generate, nothing to lease, no batch: a deadlock"
        lease_id, version = begun.pop(0)
        offer(replay, lease_id, version)


def test_where_others_are_replayed_a_batch_after_the_next_takes_fewer_places() -> None:
    budget = StalenessBudget(groups_per_step=4, max_staleness=0)
    assert [budget.floor(pending, 7, places=2) for pending in range(9)] == [7, 7, 7, 7, 8, 8, 9, 9, 10]
    assert [budget.floor(pending, 7) for pending in range(9)] == [7, 7, 7, 7, 8, 8, 8, 8, 9]
