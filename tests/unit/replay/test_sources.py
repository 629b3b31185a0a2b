"""Sources of prompts by their ids, and the counts of each in the buffer."""

from collections import Counter
from dataclasses import replace

from protocol.config.learning import RerollSection
from replay.journal.writer import Journal
from replay.rerolls import RerollRules
from replay.sources import ENVIRONMENTS, ONE, Parts, Sources
from tests.unit.replay.builders import buffer, cut, delivery, fill, group, lease, offer, resumed

BOTH = Sources(("easy", "hard"), (0, 2))


def of_sources(totals: Counter[str]) -> dict[str, int]:
    return {name.removeprefix("sources/"): count for name, count in totals.items() if name.startswith("sources/")}


def test_a_source_has_a_range_of_prompt_ids() -> None:
    three = Sources.of(("a", "b", "c"), (2, 1, 3))
    assert three == Sources(("a", "b", "c"), (0, 2, 3))
    assert [three.name_of(prompt_id) for prompt_id in range(6)] == ["a", "a", "b", "c", "c", "c"]
    assert [three.number_of(prompt_id) for prompt_id in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [three.range_of(name) for name in "abx"] == [(0, 1), (2, 2), None]
    first, last = three.range_of("c") or (0, 0)
    assert (first, last) == (3, 2**62 - 1)


def test_the_journal_names_them() -> None:
    assert BOTH.facts == {"sources": '[["easy", 0], ["hard", 2]]'}
    assert Sources.of_facts(BOTH.facts) == BOTH
    assert Sources.of_facts(ONE.facts) == Sources.of_facts({}) == ONE


def test_one_source_alone_has_no_name_and_no_totals(journal: Journal) -> None:
    for alone in (Sources.of(("only",), (5,)), Sources.of((), (5,))):
        assert alone == ONE
        assert (alone.name_of(3), alone.number_of(3)) == ("", 0)
    replay = buffer(journal)
    fill(replay)
    cut(replay)
    assert of_sources(replay.totals) == {}


def test_groups_leases_and_failures_are_counted_by_source(journal: Journal) -> None:
    replay = buffer(journal, num_prompts=4, max_staleness=1, data_attempts=1, sources=BOTH)
    first, second, third, fourth = (lease(replay) for _ in range(4))  # two of each source
    offer(replay, first)
    offer(replay, second, signal=False)
    assert replay.fail(third, "reward_failed", "boom", 0.0) is False
    offer(replay, fourth)
    cut(replay)
    assert of_sources(replay.totals) == {
        "easy/leased": 2, "easy/accepted": 1, "easy/no_signal": 1, "easy/trained": 1,
        "hard/leased": 2, "hard/accepted": 1, "hard/failed": 1, "hard/dead_letters": 1, "hard/trained": 1,
    }  # fmt: skip
    replay.fail(fourth, "expired", "", 0.0)
    assert replay.totals["sources/hard/failed"] == 1, "it had its group"


def test_groups_that_are_too_old_are_counted_by_source(journal: Journal) -> None:
    replay = buffer(journal, num_prompts=4, groups_per_step=1, sources=BOTH)
    waits = lease(replay, timeout_s=1.0)
    replay.expire(1.0)
    late = lease(replay, timeout_s=1.0)
    replay.expire(1.0)
    assert [offer(replay, lease_id) for lease_id in (lease(replay), waits)] == ["accepted", "accepted"]
    cut(replay)
    assert offer(replay, late) == "stale"
    assert replay.next_batch(0.0) is None
    assert of_sources(replay.totals) == {
        "easy/leased": 2, "easy/failed": 2, "easy/accepted": 1, "easy/stale": 1, "easy/went_stale": 1,
        "hard/leased": 1, "hard/accepted": 1, "hard/trained": 1,
    }  # fmt: skip


def test_the_next_process_counts_what_the_checkpoint_does_not_know(journal: Journal) -> None:
    replay = buffer(journal, num_prompts=4, max_staleness=1, sources=BOTH)
    ids = [lease(replay) for _ in range(4)]
    offer(replay, ids[0])
    state = replay.state()
    replay.offer([delivery(ids[1]), delivery(ids[2], signal=False), delivery(ids[3])])
    restored = resumed(journal, state, 0, num_prompts=4, max_staleness=1, sources=BOTH)
    assert of_sources(restored.totals) == {
        "easy/leased": 2, "easy/accepted": 2, "hard/leased": 2, "hard/accepted": 1, "hard/no_signal": 1,
    }  # fmt: skip
    assert of_sources(restored.totals) == of_sources(replay.totals)


def test_each_source_may_have_a_judge_of_its_own() -> None:
    """The reward of `group` is 0 of one completion and 1 of the other; a column that is not there judges nothing."""
    rules = RerollRules(RerollSection(), sources=BOTH, judges=(0, 1))
    assert rules.grade(group("0-1-0-1-s")) == ("mixed", 2, 1)
    assert rules.grade(group("0-2-0-1-s")) == ("unscored", 0, 0)


def test_environments_are_counted_beside_sources_also_after_a_restart(journal: Journal) -> None:
    """Prompts 0 and 1 are of the source easy; even ones are played by dice."""
    parts = Parts(ENVIRONMENTS, ("dice", "maze"), lambda prompt_id: ("dice", "maze")[prompt_id % 2])
    for sources in (replace(BOTH, environments=parts), Sources(environments=parts)):
        totals = Counter[str]()
        sources.count(totals, "leased", [0, 1, 2])
        expected = {"environments/dice/leased": 2, "environments/maze/leased": 1}
        by_source = {"sources/easy/leased": 2, "sources/hard/leased": 1} if sources.names else {}
        assert totals == expected | by_source
    replay = buffer(journal, num_prompts=4, max_staleness=1, sources=Sources(environments=parts))
    fill(replay, count=3)
    again = resumed(journal, None, 0, sources=Sources(environments=parts))
    assert again.totals["environments/dice/accepted"] == 2
    assert again.totals["environments/maze/accepted"] == 1
