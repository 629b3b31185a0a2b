"""Recovery times and the surviving digests, worked by hand."""

from campaigns.chaos.collect import surviving
from campaigns.chaos.recovery_times import recoveries


def test_a_recovery_ends_with_the_first_sign_of_life_before_the_next_start_and_the_first_start_is_none() -> None:
    starts = [("a", "", 0.0), ("b", "", 0.0), ("a", "", 10.0), ("a", "", 20.0), ("a", "", 21.0)]
    assert recoveries(starts, {"a": [24.0, 12.6, 12.5, 1.0]}) == {"a": [2.5, None, 3.0], "b": []}


def test_digests_of_steps_that_were_undone_do_not_survive() -> None:
    def line(step: int, digest: str) -> dict[str, object]:
        return {"what": "policy", "step": step, "digest": digest}

    logs = [
        [{"what": "start", "step": 0}, line(1, "a"), line(2, "b"), line(3, "c")],
        [{"what": "process"}],
        [{"what": "start", "step": 1}, line(2, "B")],
    ]
    assert surviving(logs, "policy", "digest") == {1: "a", 2: "B"}
