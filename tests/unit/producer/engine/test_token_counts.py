"""Tokens are counted as the engine's workers launch steps, and what has ended is forgotten when nobody can ask for it."""

from types import SimpleNamespace

from producer.engine import exchange_worker as token_counts
from producer.engine.exchange_worker import TokenCounts, completion_of


def step(new=(), cached=(), scheduled=None, finished=()):
    """A SchedulerOutput: `new` (id, prompt length, computed), `cached` (id, computed, tokens so far)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[0] * length, num_computed_tokens=computed)
            for name, length, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row[0] for row in cached],
            num_computed_tokens=[row[1] for row in cached],
            num_output_tokens=[row[2] for row in cached],
        ),
        num_scheduled_tokens=scheduled or {},
        finished_req_ids=set(finished),
    )


def test_tokens_are_counted_by_the_steps_that_were_launched():
    counts = TokenCounts()
    counts.note(step(new=[("a", 5, 0), ("b", 10, 8), ("c", 9, 0)], scheduled={"a": 5, "b": 2, "c": 4}))
    assert counts.take() == {"a": 1, "b": 1, "c": 0}, "c has not computed its whole prompt"
    counts.note(step(cached=[("a", 5, 1), ("c", 4, 0)], scheduled={"a": 1, "c": 5}))
    assert counts.take() == {"a": 2, "b": 1, "c": 1}, "b was not scheduled"
    counts.note(step(cached=[("a", 6, 2)], scheduled={"a": 1}, finished=["c"]))
    assert counts.take() == {"a": 3, "b": 1, "c": 1}, "c's end may not be known yet"
    assert counts.take() == {"a": 3, "b": 1}


def test_a_preempted_request_keeps_its_tokens_while_it_computes_them_once_more():
    counts = TokenCounts()
    counts.note(step(new=[("a", 4, 0)], scheduled={"a": 4}))
    counts.note(step(cached=[("a", 4, 1)], scheduled={"a": 1}))
    counts.note(step(cached=[("a", 0, 2)], scheduled={"a": 3}))
    assert counts.take() == {"a": 2}
    counts.note(step(new=[("a", 4, 0)], scheduled={"a": 2}))  # as vLLM's second model runner is told of it
    assert counts.take() == {"a": 2}
    counts.note(step(cached=[("a", 2, 2)], scheduled={"a": 4}))
    assert counts.take() == {"a": 3}


def test_the_names_of_completions():
    assert completion_of("group-7-1a2b") == ("group-7", 0)
    assert completion_of("13_group-7-1a2b") == ("group-7", 13)
    assert completion_of("score-3") is completion_of("a-group-0") is None


def test_what_clients_asked_for_while_no_policy_comes_is_forgotten(monkeypatch):
    """Without a trainer there is no flip, and nobody takes the counts."""
    monkeypatch.setattr(token_counts, "_KEPT_ENDED", 50)
    counts = TokenCounts()
    counts.note(
        step(new=[("0_group-0-a", 5, 0), ("1_group-0-a", 5, 0)], scheduled={"0_group-0-a": 5, "1_group-0-a": 5})
    )
    counts.note(step(finished=["0_group-0-a"]))
    for number in range(1, 1000):
        name = f"group-{number}-a"
        counts.note(step(new=[(name, 5, 0)], scheduled={name: 5}))
        counts.note(step(finished=[name, f"never scheduled {number}"]))
        assert len(counts._ended) <= 150
    for facts in (counts._prompt_lens, counts._num_computed, counts._num_scheduled):
        assert len(facts) <= 150
    taken = counts.take()
    assert taken["0_group-0-a"] == taken["1_group-0-a"] == 1, "one of the group still runs"
    assert taken["group-999-a"] == 1, "the producer may not have heard of its end"
    assert "group-1-a" not in taken
    assert list(counts.take()) == ["1_group-0-a"]
