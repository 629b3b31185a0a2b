"""Ledger, journal, selector and buffer together, through any order of events and crashes, against lists and sets.

What must hold after every event: each accepted group is in exactly one place, none is trained for the first time twice, no
prompt and no return is lost, and what a crash sets back is done again as it was done before.
"""

import copy
import itertools
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from replay.batch_rule import BatchRule
from replay.batch_selection import BatchSelector
from replay.buffer import RolloutBuffer
from replay.journal.writer import JournalFullError
from replay.replay_table import ReplayTable
from replay.rewards import SignalWatch
from replay.staleness import StalenessBudget
from replay.watches import FailureWatch
from tests.unit.replay.builders import (
    SHAPE,
    FillableJournal,
    delivery,
    mean_reward,
    memory_folder,
    names,
    replay_settings,
    reroll_rules,
    spread,
)
from tests.unit.replay.crash_invariants import Invariants
from tests.unit.replay.crash_records import ATTEMPTS, REWARDS, Checkpoint, GroupStats, key_of

PATIENCE_S = 3.0


def occasionally(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([None] * 6 + list(values))


class RunMachine(Invariants, RuleBasedStateMachine):
    """One run of a trainer, over any number of processes."""

    @initialize(
        num_prompts=st.sampled_from([1, 2, 3, 5, 8, 13]),
        shuffle=st.booleans(),
        budget=st.builds(
            StalenessBudget, st.sampled_from([1, 2, 3, 3]), st.integers(0, 2), st.integers(1, 2), st.integers(1, 2)
        ),
        rules=st.builds(
            reroll_rules,
            delay_versions=st.integers(0, 1),
            max_attempts=st.sampled_from([0, 1, 2, 3]),
            solved_cooldown_epochs=st.sampled_from([0, 0, 1, 2]),
        ),
        max_share=st.sampled_from([0.3, 1.0]),
        max_pending=st.integers(1, 3),
        replaying=st.builds(
            replay_settings,
            max_size=st.integers(2, 4),
            max_times_sampled=st.integers(2, 3),
            max_age_versions=st.integers(1, 3),
            samples_per_insert=st.sampled_from([1.0, 4.0]),
            min_size=st.integers(1, 2),
        ),
        without_replay=occasionally(True),
        max_replayed=st.integers(1, 2),
        sampled=st.booleans(),
    )
    def start(self, max_replayed: int, without_replay: bool | None, **choices: Any) -> None:
        vars(self).update(choices)
        self.replaying = None if without_replay else self.replaying
        self.max_replayed = min(max_replayed, self.budget.groups_per_step - 1)
        self.exits = ExitStack()
        self.folder = self.exits.enter_context(memory_folder())
        self.begin_run()
        self.newest_version = -1
        self.sessions = 0
        self.open_journal(self.folder / "journal.sqlite")
        self.begin_process()

    def teardown(self) -> None:
        if hasattr(self, "exits"):
            try:
                self.journal.full = False
                self.trains_on()  # whatever happened
            finally:
                self.journal.close()
                self.exits.close()

    def open_journal(self, path: Path) -> None:
        self.journal = FillableJournal(path)

    def begin_process(self) -> None:
        """A process starts at the newest checkpoint."""
        checkpoint = self.checkpoints[-1]
        self.sessions += 1
        self.recover(checkpoint)
        self.selector = BatchSelector(
            self.budget,
            self.journal,
            (BatchRule.sampled if self.sampled else BatchRule.full)(self.budget.groups_per_step),
            signal=spread,
            replay=ReplayTable(self.replaying, 0) if self.replaying else None,
            max_replayed=self.max_replayed,
        )
        book, watches = self.new_ledger(f"s{self.sessions}"), (FailureWatch(1.0), SignalWatch(None))
        self.replay = RolloutBuffer(book, self.selector, self.journal, self.rules, mean_reward, *watches)
        self.replay.restore(checkpoint.state, step=self.step, shape=SHAPE, comparable=self.comparable)
        assert self.replay.newest_version == self.newest_version
        self.publish()
        self.step_ended()
        self.tally: Counter[str] = Counter()
        self.counted = Counter(self.replay.totals)
        self.offset = self.not_accounted_for()

    def publish(self) -> None:
        self.journal.end_step(self.step)
        self.journal.note_policy(self.version, self.step, "digest")
        self.replay.published(self.version)
        self.newest_version = max(self.newest_version, self.version)

    # Producers

    @rule(producer=st.sampled_from("ab"), count=st.integers(1, 4))
    def leases(self, producer: str, count: int) -> None:
        for _ in range(count):
            self.lease(producer)

    def lease(self, producer: str) -> str | None:
        floor = self.floor_of_leases()
        record = self.replay.lease(producer, now=self.now, timeout_s=PATIENCE_S)
        assert (record is None) == (floor > self.version)
        if record is None:
            return None
        key = record.task.key
        self.was_leased(key)
        assert record.lease_id not in self.given
        assert key_of(record.lease_id) == key
        assert record.policy_floor == max(floor, self.prompts.returned.get(key, 0))
        self.given[record.lease_id] = None
        self.live[record.lease_id] = (producer, self.now + PATIENCE_S)
        self.tally["leased"] += 1
        return record.lease_id

    def some_lease(self, data: st.DataObject) -> str:
        """Of this process, or any other one; some were answered long ago, and some were never given."""
        strange = ["9-0-0-1-x", "0-0-7-1-x", f"{self.prompts.epoch + 1}-{self.num_prompts - 1}-0-1-x"]
        open_ = self.prompts.open | set(self.prompts.deferred)
        unanswered = [lease_id for lease_id in self.given if key_of(lease_id) in open_]
        pools = [list(self.live), list(self.live), unanswered, unanswered, list(self.given)[-12:], strange]
        return data.draw(st.sampled_from(data.draw(st.sampled_from([pool for pool in pools if pool]))))

    @rule(data=st.data(), count=st.integers(1, 3))
    def groups_arrive(self, data: st.DataObject, count: int) -> None:
        arriving = []
        for _ in range(count):
            lag = data.draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3]))
            version = max(0, data.draw(st.sampled_from([self.version, self.newest_version])) - lag)
            arriving.append((self.some_lease(data), version, data.draw(st.sampled_from(list(REWARDS)))))
        self.offer(arriving)

    @rule(count=st.integers(1, 6), rewards=st.sampled_from(list(REWARDS)))
    def producers_answer_promptly(self, count: int, rewards: tuple[float, float]) -> None:
        self.offer([(lease_id, self.version, rewards) for lease_id in list(self.live)[:count]])

    def offer(self, arriving: list[GroupStats]) -> None:
        expected = self.judge(arriving)
        deliveries = [delivery(lease_id, version, rewards=rewards) for lease_id, version, rewards in arriving]
        if self.journal.full and any(outcome in ("accepted", "no_signal", "stale") for outcome in expected):
            with pytest.raises(JournalFullError):
                self.replay.offer(deliveries)
            return
        assert self.replay.offer(deliveries) == expected
        self.tally.update(expected)
        for arrival, outcome in zip(arriving, expected, strict=True):
            if outcome not in ("duplicate", "unknown_lease"):
                self.admit(arrival, outcome)

    def fails(self, lease_id: str, reason: str) -> str:
        """What the end of a lease must lead to: moot, again, dead, or full (nothing happens)."""
        key, of = key_of(lease_id), "data" if reason in ("reward_failed", "bad_prompt") else "infra"
        if lease_id not in self.live or key not in self.prompts.open:
            self.live.pop(lease_id, None)
            return "moot"
        failures = self.prompts.failures[key, of] + 1
        spent = reason == "bad_prompt" or failures >= ATTEMPTS[of]
        if spent and self.journal.full:
            return "full"
        self.prompts.failures[key, of] = failures
        del self.live[lease_id]
        if spent:
            self.settle(key)
            self.dead[key] = None
            self.tally["dead_letters"] += 1
            return "dead"
        self.again[key] = self.now + {"data": 1.0, "infra": 0.25}[of] * 2 ** (failures - 1)
        return "again"

    @rule(data=st.data(), reason=st.sampled_from(["reward_failed", "generation_failed", "bad_prompt"]))
    def a_prompt_fails(self, data: st.DataObject, reason: str) -> None:
        lease_id = self.some_lease(data)
        expected = self.fails(lease_id, reason)
        if expected == "full":
            with pytest.raises(JournalFullError):
                self.replay.fail(lease_id, reason, "boom", self.now)
        else:
            assert self.replay.fail(lease_id, reason, "boom", self.now) is {"moot": None, "again": True}.get(
                expected, False
            )

    @rule(data=st.data())
    def a_lease_is_given_back(self, data: st.DataObject) -> None:
        lease_id = self.some_lease(data)
        self.replay.give_back(lease_id)
        if self.live.pop(lease_id, None) and key_of(lease_id) in self.prompts.open:
            self.again[key_of(lease_id)] = 0.0

    @rule(seconds=st.sampled_from([0.3, 1.0, 2.5, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        overdue = [lease_id for lease_id, (_, deadline) in self.live.items() if deadline <= self.now]
        ended = {lease_id for lease_id in overdue if self.fails(lease_id, "expired") != "full"}
        assert {record.lease_id for record in self.replay.expire(self.now)} == ended

    @rule(producer=st.sampled_from("ab"), kept=st.integers(0, 2))
    def a_producer_leaves(self, producer: str, kept: int) -> None:
        mine = [lease_id for lease_id, (owner, _) in self.live.items() if owner == producer]
        assert self.replay.leased_to(producer) == set(mine)
        ended = {lease_id for lease_id in mine[kept:] if self.fails(lease_id, "released") != "full"}
        keep = frozenset(mine[:kept])
        assert {record.lease_id for record in self.replay.release(producer, self.now, keep)} == ended

    @rule(data=st.data(), count=st.integers(1, 4))
    def a_producer_returns(self, data: st.DataObject, count: int) -> None:
        lease_ids = list(dict.fromkeys(self.some_lease(data) for _ in range(count)))
        expected: dict[str, bool | None] = {}
        for lease_id in lease_ids:
            key = key_of(lease_id)
            if lease_id in self.rows:
                expected[lease_id] = None
                continue
            expected[lease_id] = self.is_known(key) and self.is_wanted(key) and not self.is_leased(key)
            if expected[lease_id]:
                self.reach(key)
                del self.again[key]
                self.given[lease_id] = None
                self.live[lease_id] = ("b", self.now + PATIENCE_S)
        assert self.replay.adopt("b", lease_ids, deadline=self.now + PATIENCE_S) == expected

    # The trainer

    @precondition(lambda self: self.current is None)
    @rule()
    def a_batch_is_cut(self) -> None:
        expected = None if self.journal.full else self.next_cut()
        batch = self.replay.next_batch(0.0)
        assert (batch is None) == (expected is None)
        if batch is None or expected is None:
            return
        assert names(batch.groups) == expected.ids
        assert (batch.first_step, batch.last_step, batch.num_fresh) == (
            expected.first,
            expected.last,
            expected.num_fresh,
        )
        assert batch.num_iterations == expected.last - max(expected.first - 1, self.step)
        self.was_cut(expected)

    @precondition(lambda self: self.current is not None)
    @rule()
    def a_step_ends(self) -> None:
        assert self.current is not None
        step = self.step + 1
        policy = self.budget.version_at(step) if step % self.budget.sync_interval == 0 else None
        if self.journal.full:
            with pytest.raises(JournalFullError):
                self.journal.end_step(step)
            return
        self.step = step
        self.log.append((step, self.current))
        if step == self.current.last:
            self.step_ended()
            self.current = None
        if policy is None:
            self.journal.end_step(step)
        else:
            self.version = policy
            self.publish()

    @precondition(lambda self: self.current is None or self.step >= self.current.first)
    @rule()
    def a_checkpoint_is_committed(self) -> None:
        """Between two steps."""
        state = json.loads(json.dumps(self.replay.state()))
        prompts, table = copy.deepcopy(self.prompts), dict(self.table)
        self.checkpoints.append(
            Checkpoint(self.step, state, prompts, len(self.rows), table, self.num_trained, self.last_answer)
        )

    @rule(
        count=st.integers(1, 5),
        checkpoint_every=st.integers(1, 6),
        answers=st.lists(st.sampled_from(list(REWARDS)), max_size=4),
    )
    def all_goes_well(self, count: int, checkpoint_every: int, answers: list[tuple[float, float]]) -> None:
        if self.journal.full:
            return
        for done in range(1, count + 1):
            self.trains_on(answers)
            if done % checkpoint_every == 0 and not (self.current and self.step < self.current.first):
                self.a_checkpoint_is_committed()

    def trains_on(self, answers: Sequence[tuple[float, float]] = ()) -> None:
        """Until a step ends."""
        rewards = itertools.cycle([*answers, (0.0, 1.0)])
        for _ in range(200):
            if self.current is None:
                self.a_batch_is_cut()
            if self.current is not None:
                self.a_step_ends()
                return
            self.lease("a")
            self.offer([(lease_id, self.version, next(rewards)) for lease_id in self.live])
            self.now += 0.25
        pytest.fail("no batch can be had any more")

    # What goes wrong

    @rule(full=st.booleans())
    def the_disk_fills_up_or_has_room_again(self, full: bool) -> None:
        self.journal.full = full

    @rule(
        kind=st.sampled_from(["killed", "stopped"]),
        lost_checkpoints=st.sampled_from([0, 0, 0, 1, 2]),
        groups_per_step=occasionally(1, 2, 3),
        num_iterations=occasionally(1, 2),
        incomparable=occasionally(True),
    )
    def the_trainer_ends_and_another_begins(
        self,
        kind: str,
        lost_checkpoints: int,
        groups_per_step: int | None,
        num_iterations: int | None,
        incomparable: bool | None,
    ) -> None:
        path = self.journal.path
        if kind == "killed":
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            for file in path.parent.glob("journal.sqlite*"):
                shutil.copy(file, folder)
            path = folder / path.name
        self.journal.close()
        self.open_journal(path)
        del self.checkpoints[max(1, len(self.checkpoints) - lost_checkpoints) :]
        self.budget = replace(
            self.budget,
            groups_per_step=groups_per_step or self.budget.groups_per_step,
            num_iterations=num_iterations or self.budget.num_iterations,
        )
        self.max_replayed = min(self.max_replayed, self.budget.groups_per_step - 1)
        self.comparable = not incomparable
        self.begin_process()

    @rule(times=st.integers(1, 2))
    def the_trainer_dies_over_a_batch(self, times: int) -> None:
        for _ in range(times):
            if self.current is None:
                self.a_batch_is_cut()
            self.the_trainer_ends_and_another_begins("killed", 0, None, None, None)


RunMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=50)
TestRunMachine = pytest.mark.long(RunMachine.TestCase)
