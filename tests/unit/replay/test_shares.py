"""Places of environments: nobody has more than a share, nobody none, and what nobody else may take is lent."""

import json
import random
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.lease_ids import Key, LeaseId
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import Held
from replay.shares import EnvironmentShares
from replay.staleness import StalenessBudget
from tests.unit.replay.builders import ledger


@pytest.mark.parametrize(
    ("budget", "most"),
    [
        (StalenessBudget(8, 2), 24),
        (StalenessBudget(8, 0), 8),
        (StalenessBudget(4, 1, sync_interval=2), 16),
        (StalenessBudget(4, 2, num_iterations=2), 8),
    ],
)
def test_the_most_groups_that_may_be_pending(budget: StalenessBudget, most: int) -> None:
    assert budget.most_pending == most
    assert budget.floor(most - 1, 0) == 0
    assert budget.floor(most, 0) > 0


@pytest.mark.parametrize(
    ("parts", "budget", "capacity", "places"),
    [
        ({"a": 0.5, "b": 0.5}, StalenessBudget(8, 2), 100, {"a": 12, "b": 12}),
        ({"a": 0.5, "b": 0.5}, StalenessBudget(8, 2), 10, {"a": 5, "b": 5}),
        ({"a": 0.75, "b": 0.25}, StalenessBudget(8, 3), 16, {"a": 12, "b": 4}),
        ({"a": 0.99, "b": 0.01}, StalenessBudget(8, 2), 100, {"a": 16, "b": 1}),  # 8 are left for a step without it
        ({"a": 0.99, "b": 0.01}, StalenessBudget(8, 0), 100, {"a": 7, "b": 1}),
        ({"a": 1.0}, StalenessBudget(8, 2), 0, {"a": 1}),
    ],
)
def test_places_by_hand(
    parts: dict[str, float], budget: StalenessBudget, capacity: int, places: dict[str, float]
) -> None:
    assert EnvironmentShares(parts, budget).places(capacity, {}, {}) == pytest.approx(places)


def test_what_nobody_else_may_take_is_lent_and_given_back() -> None:
    shares = EnvironmentShares({"a": 0.5, "b": 0.5}, StalenessBudget(8, 2))
    assert shares.full({"a": 5}, 10, {}, {}) == {"a"}
    assert shares.full({"a": 5, "b": 5}, 10, {}, {}) == frozenset()
    assert shares.full({"a": 7, "b": 4}, 10, {}, {}) == {"a"}
    assert shares.full({}, 10, {}, {}) == frozenset()


@pytest.mark.long
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    step=st.integers(1, 64),
    staleness=st.integers(0, 4),
    capacity=st.integers(0, 500),
)
def test_no_environment_has_all_places_but_alone(
    weights: list[float], step: int, staleness: int, capacity: int
) -> None:
    parts = {str(number): weight / sum(weights) for number, weight in enumerate(weights)}
    budget = StalenessBudget(step, staleness)
    places = EnvironmentShares(parts, budget).places(capacity, {}, {})
    total = min(capacity, budget.most_pending)
    assert min(places.values()) >= 1
    assert all(each <= max(1, parts[name] * total) + 1e-9 for name, each in places.items())
    if staleness:
        assert max(places.values()) <= max(1, budget.most_pending - step), "the others can fill a step"


def test_while_one_environment_hangs_the_other_goes_on_and_no_prompt_is_lost() -> None:
    """Even prompts are of an environment that answers nothing until the end."""

    def environment_of(prompt_id: int) -> str:
        return "odd" if prompt_id % 2 else "even"

    shares = EnvironmentShares({"odd": 0.5, "even": 0.5}, StalenessBudget(8, 2))
    book = ledger(200, shuffle=True, environment_of=environment_of)
    answered: list[int] = []
    held: dict[str, list[LeaseId]] = {"odd": [], "even": []}
    draw = random.Random(0)
    while len(answered) < 60:
        while record := leased(book, shares.full(book.leases.in_lane, 16, book.newest, waiting(book, shares)), 16):
            held[environment_of(record.key.prompt_id)].append(record)
        assert all(6 <= each <= 10 for each in book.leases.in_lane.values()), "about half, as the newest prompts are"
        lease = held["odd"].pop(draw.randrange(6))
        book.mark_answered(lease, Held("mixed", 0))
        book.mark_done(lease.key)
        answered.append(lease.key.prompt_id)
    assert len(set(answered)) == 60
    assert all(each % 2 for each in answered)
    again = ledger(200, shuffle=True, environment_of=environment_of)
    again.restore(json.loads(json.dumps(book.state())))
    rest = [record.key.prompt_id for record in iter(lambda: leased(again, (), 140), None)]
    assert sorted(answered + rest) == list(range(200)), "what was put off is not lost"


def waiting(book: PromptLedger, shares: EnvironmentShares) -> dict[str, int]:
    return {name: book.leases.num_waiting(name) for name in shares.parts}


def leased(book: PromptLedger, full: Collection[str], most: int) -> LeaseId | None:
    """Lease a prompt, unless as many as `most` are leased."""
    if book.leases.num_leases >= most:
        return None
    record = book.lease("p", version=0, policy_floor=0, now=0.0, deadline=1e9, full=full)
    return LeaseId.parse(record.lease_id) if record else None


def test_prompts_without_a_place_wait_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.prompt_ledger.MOST_PUT_OFF", 3)
    book = ledger(10, environment_of=lambda prompt_id: "slow" if prompt_id < 6 else "fast")
    assert leased(book, {"slow"}, 9) is None
    assert book.leases.num_waiting("slow") == 3
    found = [leased(book, (), 9) for _ in range(4)]
    assert [each.key.prompt_id for each in found if each] == [0, 1, 2, 3], "those that wait go first"
    assert leased(book, {"slow"}, 9) == LeaseId(Key(0, 6), 1, "s")


@pytest.mark.long
def test_an_environment_that_is_asked_less_leaves_its_places_to_the_others() -> None:
    """Draws as `dataset.sampling: by_signal` makes them: of 1,024 prompts 93 are of `rare`, of an epoch half."""
    shares = EnvironmentShares({"rare": 0.5, "usual": 0.5}, StalenessBudget(8, 9))
    newest = {"rare": 93, "usual": 931}
    places = {name: 40 * count / 1024 for name, count in newest.items()}
    assert shares.places(40, newest, {}) == pytest.approx(places)
    assert shares.places(40, newest, {"rare": 512}) == pytest.approx(places | {"rare": 1.25 * places["rare"]})
    assert shares.places(40, newest, {"usual": 512})["usual"] == 39, "one is left"
    book = ledger(4000, shuffle=True, environment_of=lambda prompt_id: "rare" if prompt_id % 11 == 0 else "usual")
    held: list[LeaseId] = []
    for number in range(2000):
        while record := leased(book, shares.full(book.leases.in_lane, 40, book.newest, waiting(book, shares)), 40):
            held.append(record)
        assert len(held) == 40, "no place is idle"
        record = held.pop(number * 7 % 40)
        book.mark_answered(record, Held("mixed", 0))
        book.mark_done(record.key)
    assert book.leases.num_waiting("usual") < 256
    assert sum(book.newest.values()) == 1024
