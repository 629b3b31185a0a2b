"""What must hold after every event of test_crashes.py."""

from collections import Counter

from hypothesis.stateful import invariant

from replay.batch_selection import BatchSelector
from replay.buffer import RolloutBuffer
from tests.unit.replay.builders import FillableJournal
from tests.unit.replay.crash_model import Model
from tests.unit.replay.crash_records import key_of

OUTCOMES = ("accepted", "no_signal", "stale", "duplicate", "unknown_lease")


class Invariants(Model):
    """Of the run against the model, and of the model alone."""

    replay: RolloutBuffer
    selector: BatchSelector
    journal: FillableJournal
    tally: Counter[str]
    counted: Counter[str]
    offset: int

    def not_accounted_for(self) -> int:
        counts = self.replay.totals
        return counts["accepted"] - counts["trained"] - counts["went_stale"] - self.replay.depth()["ready"]

    @invariant()
    def the_journal_says_what_became_of_every_group(self) -> None:
        columns = "lease_id, policy_version, outcome, verdict, step, last_step, position, tries, dropped"
        expected = [
            (row.lease_id, row.version, row.outcome, row.verdict, *(row.claim or (None,) * 3), row.tries, row.dropped)
            for row in self.rows.values()
        ]
        assert self.journal.query(f"SELECT {columns} FROM groups ORDER BY seq") == expected
        assert self.journal.query("SELECT step, position, last_step, lease_id, tries FROM replays") == [
            (*place, replay_of_it.last, replay_of_it.lease_id, replay_of_it.tries)
            for place, replay_of_it in sorted(self.replayed.items())
        ]
        letters = self.journal.query("SELECT epoch, prompt_id, reroll FROM dead_letters ORDER BY id")
        assert letters == list(self.dead)

    @invariant()
    def every_accepted_group_is_in_one_place(self) -> None:
        fresh = list(self.selector._fresh)
        recorded = [(batch.lease_ids, batch.num_fresh) for batch in self.selector._recorded]
        assert fresh == self.ready
        assert recorded == [(cut.ids, cut.num_fresh) for cut in self.recorded]
        again = [lease_id for cut in self.recorded for lease_id in cut.fresh]
        in_step = [] if self.current is None else self.current.fresh
        trained = [
            row.lease_id for row in self.rows.values() if row.claim and row.claim[1] <= self.step and not row.dropped
        ]
        dropped = [row.lease_id for row in self.rows.values() if row.dropped]
        places = Counter([*fresh, *again, *in_step, *trained, *dropped])
        assert places == Counter(row.lease_id for row in self.rows.values() if row.outcome == "accepted")

    @invariant()
    def nothing_is_trained_for_the_first_time_twice(self) -> None:
        assert [step for step, _ in self.log] == list(range(1, self.step + 1))
        steps: dict[str, list[int]] = {}
        for step, cut in self.log:
            for lease_id in cut.fresh:
                steps.setdefault(lease_id, []).append(step)
        for lease_id, trained in steps.items():
            claim = self.rows[lease_id].claim
            assert claim is not None
            assert trained == list(range(claim[0], min(claim[1], self.step) + 1))
        keys = [key_of(lease_id) for lease_id in steps]
        assert len(keys) == len(set(keys)), "two groups of one piece of task were trained"

    @invariant()
    def replays_are_trained_before_young_and_seldom(self) -> None:
        assert [row[:2] for row in self.selector.state()] == [[*item] for item in self.table.items()]
        uses: Counter[str] = Counter()
        first_trained: dict[str, int] = {}
        for cut in {id(cut): cut for _, cut in self.log}.values():
            version = self.budget.version_at(cut.first - 1)
            assert all(version - self.rows[g].version <= self.budget.max_staleness for g in cut.fresh)
            assert all(version - self.rows[g].version <= self.max_age for g in cut.again)
            assert all(first_trained[g] < cut.first for g in cut.again)
            first_trained |= dict.fromkeys(cut.fresh, cut.first)
            assert cut.fresh
            assert len(cut.again) == len(set(cut.again))
            uses.update(cut.again)
        assert all(count < self.replaying.max_times_sampled for count in uses.values() if self.replaying)
        assert self.replaying or not uses

    @invariant()
    def no_prompt_is_lost(self) -> None:
        prompts, state = self.prompts, self.replay.state()["ledger"]
        assert state["epoch"] * self.num_prompts + state["position"] == prompts.cursor
        unsettled = [(epoch, prompt_id, reroll) for epoch, prompt_id, reroll, *_ in state["unsettled"]]
        assert len(unsettled) == len(set(unsettled))
        assert set(unsettled) == prompts.open | prompts.held
        assert not prompts.settled & set(unsettled)
        passed = {self.key_at(index) for index in range(prompts.cursor)}
        turns = {key for key in prompts.open | prompts.held | prompts.settled if key[2] == 0}
        assert turns <= passed <= turns | prompts.passed_over
        leased = [key_of(lease_id) for lease_id in self.live]
        assert len(leased) == len(set(leased)) == self.replay.depth()["leased"]
        assert prompts.open == {key for key in leased if key in prompts.open} | set(self.again)
        assert not set(leased) & set(self.again)
        waiting = self.ready + [i for cut in self.recorded if cut.first > self.step for i in cut.fresh]
        assert Counter(map(key_of, waiting)) == Counter(prompts.held)
        reasons = {key_of(lease_id) for _, cut in self.log for lease_id in cut.fresh} | set(self.dead)
        reasons |= {key_of(lease_id) for lease_id in (self.current.fresh if self.current else [])}
        reasons |= {
            key_of(row.lease_id)
            for row in self.rows.values()
            if row.outcome == "no_signal" or row.dropped == "quarantined"
        }
        assert prompts.settled == reasons

    @invariant()
    def no_return_is_lost_and_none_comes_twice(self) -> None:
        prompts, state = self.prompts, self.replay.state()["ledger"]
        assert state["deferred"] == [[*key, version] for key, version in prompts.deferred.items()]
        assert dict(state["resting"]) == prompts.cooldowns
        waiting = [key[1] for key in prompts.deferred]
        assert len(waiting) == len(set(waiting)) <= self.max_pending
        everywhere = prompts.open | prompts.held | prompts.settled
        assert not everywhere & set(prompts.deferred)
        for row in self.rows.values():
            epoch, prompt_id, reroll = key = key_of(row.lease_id)
            is_last = row.outcome != "stale" and row.dropped not in ("stale", "configuration")
            if (
                is_last
                and row.verdict == "failed"
                and reroll < self.rules.settings.max_attempts
                and key in prompts.settled
            ):
                assert (epoch, prompt_id, reroll + 1) in everywhere | set(prompts.deferred) | prompts.let_go

    @invariant()
    def the_counts_add_up(self) -> None:
        for name in (*OUTCOMES, "leased", "dead_letters"):
            assert self.replay.totals[name] - self.counted[name] == self.tally[name]
        assert self.replay.totals["trained"] + self.replay.totals["replayed"] == self.num_trained
        assert self.not_accounted_for() == self.offset
