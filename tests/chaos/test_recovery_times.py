"""Recovery times and the surviving digests, worked by hand."""

import pytest

from tests.chaos.collect import surviving
from tests.chaos.recovery_times import Recoveries, by_daemon, quantile, recoveries


def test_a_recovery_ends_with_the_first_sign_of_life_before_the_next_start() -> None:
    found = recoveries([0.0, 10.0, 20.0, 21.0], [1.0, 12.5, 12.6, 24.0])
    assert found == Recoveries([2.5, 3.0], cut_short=1)


def test_the_first_start_is_no_recovery() -> None:
    assert by_daemon([("a", "a.jsonl", 5.0), ("b", "b.jsonl", 5.0), ("a", "a.jsonl", 9.0)], {"a": [6.0, 9.5]}) == {
        "a": Recoveries([0.5], 0),
        "b": Recoveries([], 0),
    }


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_quantiles_are_values_that_were_measured(share: float, expected: float) -> None:
    assert quantile([float(value) for value in range(100, 0, -1)], share) == expected


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile([], 0.5) is None
    assert quantile([2.0], 0.99) == 2.0


def test_digests_of_steps_that_were_undone_do_not_survive() -> None:
    def line(step: int, digest: str) -> dict[str, object]:
        return {"what": "policy", "step": step, "digest": digest}

    logs = [
        [{"what": "start", "step": 0}, line(1, "a"), line(2, "b"), line(3, "c")],
        [{"what": "process"}],
        [{"what": "start", "step": 1}, line(2, "B")],
    ]
    assert surviving(logs, "policy", "digest") == {1: "a", 2: "B"}
