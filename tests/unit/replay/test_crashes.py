"""Ledger, journal, table and buffer together, through any order of events and crashes, against lists and sets.

What must hold after every event: each accepted group is in exactly one place, none is trained twice, no prompt is lost,
and what a crash sets back is done again as it was done before.
"""

import copy
import json
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replay.buffer import RolloutBuffer
from replay.cutting import CutBatch
from replay.failures import RetryBudget
from replay.journal import JournalFullError
from replay.ledger import Key, PromptLedger
from replay.staleness import StalenessBudget
from replay.table import FifoTable

from .builders import SHAPE, FillableJournal, delivery, ledger, memory_folder, names, rewards_differ

PATIENCE_S = 3.0
ATTEMPTS = {"data": 2, "infra": 3}
OUTCOMES = ("accepted", "no_signal", "stale", "duplicate", "unknown_lease")


def occasionally(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([None] * 6 + list(values))


def key_of(lease_id: str) -> Key:
    epoch, prompt_id, *_ = lease_id.split("-")
    return int(epoch), int(prompt_id)


@dataclass
class Row:
    """What the journal must say of a group."""

    group_id: str
    version: int
    outcome: str
    claim: tuple[int, int, int] | None = None  # first step, last step, position
    tries: int = 0
    dropped: str | None = None


@dataclass
class Cut:
    first: int
    last: int
    ids: list[str]


@dataclass
class Prompts:
    """Where the prompts that the cursor has passed are. Leased ones, and those that go out again, are open."""

    cursor: int = 0
    open: set[Key] = field(default_factory=set)
    held: set[Key] = field(default_factory=set)
    settled: set[Key] = field(default_factory=set)
    failures: Counter[tuple[Key, str]] = field(default_factory=Counter)


@dataclass
class Checkpoint:
    step: int
    state: dict[str, Any] | None
    prompts: Prompts


class RunMachine(RuleBasedStateMachine):
    """One run of a trainer, over any number of processes."""

    @initialize(
        num_prompts=st.integers(1, 6),
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 2),
        num_iterations=st.integers(1, 2),
        sync_interval=st.integers(1, 2),
        shuffle=st.booleans(),
    )
    def start(self, num_prompts: int, shuffle: bool, **budget: int) -> None:
        self.exits = ExitStack()
        self.folder = self.exits.enter_context(memory_folder())
        self.num_prompts, self.shuffle = num_prompts, shuffle
        self.budget = StalenessBudget(**budget)
        self.reference = self.new_ledger("reference")
        self.sequence: list[Key] = []
        self.rows: dict[str, Row] = {}
        self.cuts: dict[int, Cut] = {}  # by first step
        self.dead: set[Key] = set()
        self.given: dict[str, None] = {}  # every lease there ever was
        self.log: list[tuple[int, list[str]]] = []  # what each step of the run, as it stands, trained
        self.newest_version = -1
        self.now = 0.0
        self.sessions = 0
        self.checkpoints = [Checkpoint(0, None, Prompts())]
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

    def new_ledger(self, session: str) -> PromptLedger:
        budgets = {"data": RetryBudget(ATTEMPTS["data"], 1.0), "infra": RetryBudget(ATTEMPTS["infra"], 0.25)}
        return ledger(self.num_prompts, shuffle=self.shuffle, budgets=budgets, session=session)

    def open_journal(self, path: Path) -> None:
        self.journal = FillableJournal(path)

    # The model

    def key_at(self, index: int) -> Key:
        while len(self.sequence) <= index:
            record = self.reference.lease("p", policy_floor=0, now=0.0, deadline=1e9)
            self.sequence.append(record.item.key)
        return self.sequence[index]

    def is_fresh(self, key: Key) -> bool:
        if key[0] > len(self.sequence) // self.num_prompts:
            self.key_at((key[0] + 1) * self.num_prompts)
        passed = self.sequence[: self.prompts.cursor]
        return key not in passed

    @property
    def epoch(self) -> int:
        return max(0, self.prompts.cursor - 1) // self.num_prompts

    def is_known(self, key: Key) -> bool:
        return key[0] <= self.epoch + 1

    def is_wanted(self, key: Key) -> bool:
        return key in self.prompts.open or self.is_fresh(key)

    def is_leased(self, key: Key) -> bool:
        return any(key_of(lease_id) == key for lease_id in self.live)

    def reach(self, key: Key) -> None:
        while self.is_fresh(key):
            passed = self.key_at(self.prompts.cursor)
            self.prompts.cursor += 1
            self.prompts.open.add(passed)
            self.again[passed] = 0.0

    def goes_out_again(self, key: Key, not_before: float = 0.0) -> None:
        self.prompts.open.add(key)
        if not self.is_leased(key):
            self.again[key] = not_before

    def settle(self, key: Key) -> None:
        self.prompts.held.discard(key)
        self.prompts.open.discard(key)
        self.prompts.settled.add(key)

    @property
    def num_ready(self) -> int:
        return len(self.ready) + sum(len(cut.ids) for cut in self.recorded)

    def begin_process(self) -> None:
        """A process starts at the newest checkpoint."""
        checkpoint = self.checkpoints[-1]
        self.sessions += 1
        self.step = checkpoint.step
        self.recover(checkpoint)
        self.current: Cut | None = None
        self.version = self.budget.version_at(self.step)
        self.replay = RolloutBuffer(
            self.new_ledger(f"s{self.sessions}"),
            self.budget,
            FifoTable(),
            self.journal,
            has_signal=rewards_differ,
            reward_weights=np.ones(1, np.float32),
            max_failed_share=1.0,
        )
        self.replay.restore(checkpoint.state, step=self.step, shape=SHAPE, comparable=self.comparable)
        assert self.replay.newest_version == self.newest_version
        self.publish()
        for row in self.rows.values():
            if row.claim and row.claim[1] == self.step and not row.dropped:
                row.tries = 0
        self.tally: Counter[str] = Counter()
        self.counted = Counter(self.replay.counts)
        self.offset = self.not_accounted_for()

    comparable = True

    def recover(self, checkpoint: Checkpoint) -> None:
        """What of the journal comes back, and where that leaves every prompt."""
        self.live: dict[str, tuple[str, float]] = {}  # producer and deadline
        self.again: dict[Key, float] = {}
        self.prompts = copy.deepcopy(checkpoint.prompts)
        self.prompts.open |= self.prompts.held
        self.prompts.held = set()
        self.log = [(step, ids) for step, ids in self.log if step <= self.step]
        available = [row for row in self.rows.values() if self.is_available(row)]
        for row in available:
            if row.tries >= 2:
                row.dropped = "quarantined"
            elif not self.comparable and not (row.claim and row.claim[0] <= self.step):
                row.dropped = "configuration"
        self.recorded = self.recut()
        recorded = {group_id for cut in self.recorded for group_id in cut.ids}
        self.ready = [row.group_id for row in self.rows.values() if self.is_available(row)]
        self.ready = [group_id for group_id in self.ready if group_id not in recorded]
        self.next_step = self.recorded[0].first - 1 if self.recorded else self.step
        for row in self.rows.values():
            self.take_to_its_place(row)
        for key in self.dead:
            self.reach(key)
            self.settle(key)
        self.again = dict.fromkeys(self.prompts.open, 0.0)

    def is_available(self, row: Row) -> bool:
        return row.outcome == "accepted" and not row.dropped and (row.claim is None or row.claim[1] > self.step)

    def recut(self) -> list[Cut]:
        """The cuts that stand, and the end of those from the first that does not."""
        standing: list[Cut] = []
        broken = False
        for first in sorted(self.cuts):
            cut = self.cuts[first]
            if cut.last <= self.step:
                continue
            fits = len(cut.ids) == self.budget.groups_per_step and cut.last - first + 1 == self.budget.num_iterations
            usable = self.comparable and not any(self.rows[group_id].dropped for group_id in cut.ids)
            broken = broken or not fits or not usable
            if not broken:
                standing.append(cut)
                continue
            begun = first <= self.step
            for position, row in enumerate(self.rows[group_id] for group_id in cut.ids):
                if begun:
                    row.claim = (first, self.step, position)
                elif not row.dropped:
                    row.claim = None
            if begun:
                self.cuts[first] = Cut(first, self.step, cut.ids)
            else:
                del self.cuts[first]
        return standing

    def take_to_its_place(self, row: Row) -> None:
        key = key_of(row.group_id)
        self.reach(key)
        if row.outcome == "stale" or row.dropped in ("stale", "configuration"):
            self.prompts.held.discard(key)
            self.prompts.open.add(key)
        elif row.outcome == "no_signal" or row.dropped == "quarantined" or (row.claim and row.claim[0] <= self.step):
            self.settle(key)
        else:
            self.prompts.open.remove(key)
            self.prompts.held.add(key)

    def publish(self) -> None:
        self.journal.end_step(self.step, (self.version, "digest"))
        self.replay.published(self.version)
        self.newest_version = max(self.newest_version, self.version)

    # Producers

    @rule(producer=st.sampled_from("ab"), count=st.integers(1, 4))
    def leases(self, producer: str, count: int) -> None:
        for _ in range(count):
            self.lease(producer)

    def lease(self, producer: str) -> str | None:
        floor = self.budget.floor(len(self.live) + self.num_ready, self.next_step)
        record = self.replay.lease(producer, now=self.now, timeout_s=PATIENCE_S)
        assert (record is None) == (floor > self.version)
        if record is None:
            return None
        key = record.item.key
        if any(not_before <= self.now for not_before in self.again.values()):
            assert self.again.pop(key) <= self.now
        else:
            assert key == self.key_at(self.prompts.cursor)
            self.prompts.cursor += 1
            self.prompts.open.add(key)
        assert record.lease_id not in self.given
        assert key_of(record.lease_id) == key
        assert record.policy_floor == floor
        self.given[record.lease_id] = None
        self.live[record.lease_id] = (producer, self.now + PATIENCE_S)
        self.tally["leased"] += 1
        return record.lease_id

    def some_lease(self, data: st.DataObject) -> str:
        """Of this process, or any other one; some were answered long ago, and some were never given."""
        strange = ["9-0-0-1-x", f"{self.epoch + 1}-{self.num_prompts - 1}-0-1-x"]
        unanswered = [lease_id for lease_id in self.given if key_of(lease_id) in self.prompts.open]
        pools = [list(self.live), list(self.live), unanswered, unanswered, list(self.given)[-12:], strange]
        return data.draw(st.sampled_from(data.draw(st.sampled_from([pool for pool in pools if pool]))))

    @rule(data=st.data(), count=st.integers(1, 3))
    def groups_arrive(self, data: st.DataObject, count: int) -> None:
        arriving = []
        for _ in range(count):
            lag = data.draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3]))
            version = max(0, data.draw(st.sampled_from([self.version, self.newest_version])) - lag)
            arriving.append((self.some_lease(data), version, data.draw(st.sampled_from([True, True, True, False]))))
        self.offer(arriving)

    @rule(count=st.integers(1, 6))
    def producers_answer_promptly(self, count: int) -> None:
        self.offer([(lease_id, self.version, True) for lease_id in list(self.live)[:count]])

    def offer(self, arriving: list[tuple[str, int, bool]]) -> None:
        expected = self.judge(arriving)
        deliveries = [delivery(lease_id, version, signal=signal) for lease_id, version, signal in arriving]
        if self.journal.full and any(outcome in ("accepted", "no_signal", "stale") for outcome in expected):
            with pytest.raises(JournalFullError):
                self.replay.offer(deliveries)
            return
        assert self.replay.offer(deliveries) == expected
        self.tally.update(expected)
        for (lease_id, version, _), outcome in zip(arriving, expected, strict=True):
            if outcome in ("duplicate", "unknown_lease"):
                continue
            key = key_of(lease_id)
            self.rows[lease_id] = Row(lease_id, version, outcome)
            self.reach(key)
            self.live.pop(lease_id, None)
            self.again.pop(key, None)
            if outcome == "stale":
                self.goes_out_again(key)
            elif outcome == "no_signal":
                self.settle(key)
            else:
                self.prompts.open.remove(key)
                self.prompts.held.add(key)
                self.ready.append(lease_id)

    def judge(self, arriving: list[tuple[str, int, bool]]) -> list[str]:
        expected: list[str] = []
        answered: set[Key] = set()
        seen: set[str] = set(self.rows)
        for lease_id, version, signal in arriving:
            key = key_of(lease_id)
            if not self.is_known(key):
                expected.append("unknown_lease")
            elif lease_id in seen or key in answered or not self.is_wanted(key):
                expected.append("duplicate")
            elif version < self.budget.oldest_usable(self.next_step):
                expected.append("stale")
                seen.add(lease_id)
            else:
                expected.append("accepted" if signal else "no_signal")
                seen.add(lease_id)
                answered.add(key)
        return expected

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
            self.dead.add(key)
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
        expected = self.expected_cut()
        batch = self.replay.next_batch(0.0)
        assert (batch is None) == (expected is None)
        if batch is not None and expected is not None:
            self.check_cut(batch, expected)

    def expected_cut(self) -> Cut | None:
        if self.recorded:
            return None if self.journal.full else self.recorded.pop(0)
        oldest = self.budget.oldest_usable(self.next_step)
        stale = [group_id for group_id in self.ready if self.rows[group_id].version < oldest]
        if self.journal.full:
            return None
        for group_id in stale:
            self.rows[group_id].dropped = "stale"
            self.ready.remove(group_id)
            self.prompts.held.remove(key_of(group_id))
            self.goes_out_again(key_of(group_id))
        size = self.budget.groups_per_step
        if len(self.ready) < size:
            return None
        ids, self.ready = self.ready[:size], self.ready[size:]
        return Cut(self.next_step + 1, self.next_step + self.budget.num_iterations, ids)

    def check_cut(self, batch: CutBatch, cut: Cut) -> None:
        assert names(batch.groups) == cut.ids
        assert (batch.step, batch.last_step) == (cut.first - 1, cut.last)
        assert batch.num_iterations == cut.last - max(cut.first - 1, self.step)
        version = self.budget.version_at(batch.step)
        assert all(version - group.policy_version <= self.budget.max_staleness for group in batch.groups)
        self.cuts[cut.first] = self.current = cut
        self.next_step = cut.last
        for position, group_id in enumerate(cut.ids):
            row = self.rows[group_id]
            row.claim, row.tries = (cut.first, cut.last, position), row.tries + 1
            self.settle(key_of(group_id))

    @precondition(lambda self: self.current is not None)
    @rule()
    def a_step_ends(self) -> None:
        assert self.current is not None
        step = self.step + 1
        policy = self.budget.version_at(step) if step % self.budget.sync_interval == 0 else None
        if self.journal.full:
            with pytest.raises(JournalFullError):
                self.journal.end_step(step, None)
            return
        self.step = step
        self.log.append((step, self.current.ids))
        if step == self.current.last:
            for group_id in self.current.ids:
                self.rows[group_id].tries = 0
            self.current = None
        if policy is None:
            self.journal.end_step(step, None)
        else:
            self.version = policy
            self.publish()

    @precondition(lambda self: self.current is None or self.step >= self.current.first)
    @rule()
    def a_checkpoint_is_committed(self) -> None:
        """Between two steps."""
        state = json.loads(json.dumps(self.replay.state()))
        self.checkpoints.append(Checkpoint(self.step, state, copy.deepcopy(self.prompts)))

    @rule(count=st.integers(1, 4), checkpoint_every=st.integers(1, 5))
    def all_goes_well(self, count: int, checkpoint_every: int) -> None:
        if self.journal.full:
            return
        for done in range(1, count + 1):
            self.trains_on()
            if done % checkpoint_every == 0 and not (self.current and self.step < self.current.first):
                self.a_checkpoint_is_committed()

    def trains_on(self) -> None:
        """Until a step ends."""
        for _ in range(200):
            if self.current is None:
                self.a_batch_is_cut()
            if self.current is not None:
                self.a_step_ends()
                return
            self.lease("a")
            self.offer([(lease_id, self.version, True) for lease_id in self.live])
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
        self.budget = StalenessBudget(
            groups_per_step or self.budget.groups_per_step,
            self.budget.max_staleness,
            self.budget.sync_interval,
            num_iterations or self.budget.num_iterations,
        )
        self.comparable = not incomparable
        self.begin_process()

    @rule(times=st.integers(1, 2))
    def the_trainer_dies_over_a_batch(self, times: int) -> None:
        for _ in range(times):
            if self.current is None:
                self.a_batch_is_cut()
            self.the_trainer_ends_and_another_begins("killed", 0, None, None, None)

    # What must hold

    def not_accounted_for(self) -> int:
        counts = self.replay.counts
        return counts["accepted"] - counts["trained"] - counts["went_stale"] - self.replay.depth()["ready"]

    @invariant()
    def the_journal_says_what_became_of_every_group(self) -> None:
        if not hasattr(self, "replay"):
            return
        found = self.journal.query(
            "SELECT group_id, policy_version, outcome, step, last_step, position, tries, dropped FROM groups ORDER BY seq"
        )
        expected = [
            (row.group_id, row.version, row.outcome, *(row.claim or (None,) * 3), row.tries, row.dropped)
            for row in self.rows.values()
        ]
        assert set(found) ^ set(expected) == set()
        assert found == expected
        letters = self.journal.query("SELECT epoch, prompt_id FROM dead_letters")
        assert len(letters) == len(self.dead)
        assert set(letters) == self.dead

    @invariant()
    def every_accepted_group_is_in_one_place(self) -> None:
        if not hasattr(self, "replay"):
            return
        table = names(list(self.replay._table._groups))
        recorded = [group_id for batch in self.replay._recorded for group_id in batch.group_ids]
        assert table == self.ready
        assert recorded == [group_id for cut in self.recorded for group_id in cut.ids]
        in_step = [] if self.current is None else self.current.ids
        trained = [
            row.group_id for row in self.rows.values() if row.claim and row.claim[1] <= self.step and not row.dropped
        ]
        dropped = [row.group_id for row in self.rows.values() if row.dropped]
        places = Counter([*table, *recorded, *in_step, *trained, *dropped])
        assert places == Counter(row.group_id for row in self.rows.values() if row.outcome == "accepted")

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        if not hasattr(self, "replay"):
            return
        assert [step for step, _ in self.log] == list(range(1, self.step + 1))
        steps: dict[str, list[int]] = {}
        for step, ids in self.log:
            for group_id in ids:
                steps.setdefault(group_id, []).append(step)
        for group_id, trained in steps.items():
            claim = self.rows[group_id].claim
            assert claim is not None
            assert trained == list(range(claim[0], min(claim[1], self.step) + 1))
        keys = [key_of(group_id) for group_id in steps]
        assert len(keys) == len(set(keys)), "two groups of one prompt were trained in one epoch"

    @invariant()
    def no_prompt_is_lost(self) -> None:
        if not hasattr(self, "replay"):
            return
        state = self.replay.state()["ledger"]
        assert state["epoch"] * self.num_prompts + state["position"] == self.prompts.cursor
        unsettled = [(epoch, prompt_id) for epoch, prompt_id, *_ in state["unsettled"]]
        assert len(unsettled) == len(set(unsettled))
        assert set(unsettled) == self.prompts.open | self.prompts.held
        passed = {self.key_at(index) for index in range(self.prompts.cursor)}
        assert passed == self.prompts.open | self.prompts.held | self.prompts.settled
        leased = [key_of(lease_id) for lease_id in self.live]
        assert len(leased) == len(set(leased)) == self.replay.depth()["leased"]
        assert self.prompts.open == {key for key in leased if key in self.prompts.open} | set(self.again)
        assert not set(leased) & set(self.again)
        waiting = self.ready + [i for cut in self.recorded if cut.first > self.step for i in cut.ids]
        assert Counter(map(key_of, waiting)) == Counter(self.prompts.held)
        reasons = {key_of(group_id) for _, ids in self.log for group_id in ids} | self.dead
        reasons |= {key_of(group_id) for group_id in (self.current.ids if self.current else [])}
        reasons |= {
            key_of(row.group_id)
            for row in self.rows.values()
            if row.outcome == "no_signal" or row.dropped == "quarantined"
        }
        assert self.prompts.settled == reasons

    @invariant()
    def the_counts_add_up(self) -> None:
        if not hasattr(self, "replay"):
            return
        for name in (*OUTCOMES, "leased", "dead_letters"):
            assert self.replay.counts[name] - self.counted[name] == self.tally[name]
        assert self.not_accounted_for() == self.offset


RunMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestRunMachine = RunMachine.TestCase
