"""What is found of leases by producer, prompt and deadline, beside a table that looks at all of them."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.prompt_table import Deferred, LeaseRecord, PromptTable, PromptTask, RetryBudget, Waiting

PRODUCERS = ("a", "b", "c")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "end", "fail", "give_back"]),
        st.integers(0, 9),
        st.sampled_from(PRODUCERS),
        st.sampled_from([1.0, 2.0, 2.0, 3.0, math.inf]),
    ),
    max_size=60,
)


def table_of() -> PromptTable[int]:
    return PromptTable({"data": RetryBudget(3, 1.0), "infra": RetryBudget(3, 1.0)})


def lease(table: PromptTable[int], key: int, producer: str = "a", deadline: float = 1.0, attempt: int = 1) -> None:
    table.lease(LeaseRecord(f"{key}/{attempt}", PromptTask(key, attempt=attempt), producer, 0, deadline))


@pytest.mark.long
@given(EVENTS)
def test_the_indexes_say_what_all_leases_say(events: list[tuple[str, int, str, float]]) -> None:
    table, known = table_of(), dict[str, Any]()
    for number, (event, key, producer, deadline) in enumerate(events):
        current = table.lease_on(key)
        if event == "lease" and current is None:
            lease(table, key, producer, deadline, attempt=number)
            known[f"{key}/{number}"] = (key, producer, deadline)
        elif current is not None and event != "lease":
            if event == "end":
                table.end_lease(current.lease_id)
            elif event == "fail":
                table.fail(current.lease_id, "expired", 0.0)
            else:
                table.give_back(current.lease_id)
            del known[current.lease_id]
        assert table.num_leases == len(known)
        for name in PRODUCERS:
            assert {record.lease_id for record in table.leases_of(name)} == {
                lease_id for lease_id, (_, owner, _) in known.items() if owner == name
            }
        assert {key for key in range(10) if table.lease_on(key)} == {key for key, _, _ in known.values()}
        for now in (0.5, 2.0, 9.0):
            for _ in range(2):  # looking ends nothing
                found = table.overdue(now)
                assert {record.lease_id for record in found} == {
                    lease_id for lease_id, (_, _, at) in known.items() if at <= now
                }
                assert [record.deadline for record in found] == sorted(record.deadline for record in found)


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.sampled_from(["wait", "wait", "defer", "defer", "remove"]),
        st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0]),
        st.integers(0, 3),
        st.sampled_from([0.0, 1.0, 3.0, 9.0]),
        st.integers(0, 3),
    ),
    max_size=60,
)


@pytest.mark.long
@given(CHANGES)
def test_the_queues_say_what_a_look_at_all_prompts_says(changes: list[tuple[int, str, float, int, float, int]]) -> None:
    """Also where the clock or the newest version goes back."""
    table, known = table_of(), dict[int, tuple[str, float, int]]()
    for key, change, not_before, min_version, now, version in changes:
        if known.pop(key, None) is not None:
            table.remove(key)
        if change != "remove":
            known[key] = (change, not_before if change == "wait" else 0.0, min_version)
            table.put(PromptTask(key, min_version), Waiting(not_before) if change == "wait" else Deferred())

        def first(status: str, now: float = now, version: int = version) -> int | None:
            due = (key for key, (kind, *when) in known.items() if kind == status and when <= [now, version])
            return next((key for key in due if known[key][2] <= version), None)

        waiting, deferred = table.next_waiting(now, version), table.next_deferred(version)
        assert (waiting and waiting.key, deferred and deferred.key) == (first("wait"), first("defer"))


def test_entries_of_prompts_that_left_are_forgotten() -> None:
    table = table_of()
    for number in range(5_000):
        for status in (Waiting(1e9), Deferred()):
            table.put(PromptTask(number, 1), status)
            table.remove(number)
    for queue in (*table._waiting.values(), table._deferred):
        assert len(queue._later) + len(queue._unpublished) + len(queue._due) <= 257


def test_deadlines_of_leases_that_ended_are_forgotten() -> None:
    table = table_of()
    for number in range(10_000):
        lease(table, number, deadline=1e9)
        table.end_lease(f"{number}/1")
        table.put(PromptTask(number), Waiting())
        table.remove(number)
    assert len(table._deadlines) <= 257
    assert table.leases_of("a") == []
    assert not table._by_producer
    assert not table._by_key
