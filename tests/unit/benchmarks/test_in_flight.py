"""The numbers that `make bench-in-flight` makes of groups, by hand."""

import pytest

from benchmarks.in_flight import _numbers, _report
from producer.interfaces import Completion


def test_staleness_is_of_every_token_against_the_newest_policy_when_its_group_is_done() -> None:
    first = [Completion([1, 2, 3], [0.0] * 3, False, [4, 4, 5]), Completion([4], [0.0], False, [4])]
    second = [Completion([5, 6], [0.0] * 2, False, [6, 6])]
    turn = _numbers([(6, first), (6, second)], 2.0, 0.5, [0.0, 3.0, 1.0], cut=6, dropped=8)
    assert turn == pytest.approx(
        {
            "swap_every_s": 0.5,
            "tokens_per_s": 3.0,
            "dropped_per_s": 4.0,
            "token_staleness": 7 / 6,  # 2, 2, 1, 2 and 0, 0
            "group_staleness": 1.0,
            "group_staleness_max": 2.0,
            "cuts_per_completion": 2.0,
            "old_version_s": 1.0,
            "old_version_max_s": 3.0,
        }
    )
    report = _report({"finish": [turn, turn], "continue": [turn | {"tokens_per_s": rate} for rate in (1.5, 2.5)]})
    assert report["continue"]["tokens_per_s_against_finish"]["median"] == pytest.approx(2 / 3)
    assert report["continue"]["tokens_per_s"]["quartiles"] == [1.75, 2.25]
