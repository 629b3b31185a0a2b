"""A run as lists and sets: what test_crashes.py expects of ledger, selector, journal and buffer together."""

import copy
import math
from collections.abc import Iterable
from typing import Any

from protocol.config.learning import ReplaySection
from replay.lease_ids import Key
from replay.prompt_ledger import PromptLedger
from replay.rerolls import RerollRules
from replay.staleness import StalenessBudget
from tests.unit.replay.builders import ledger
from tests.unit.replay.crash_records import (
    ATTEMPTS,
    BURST,
    REWARDS,
    Checkpoint,
    Cut,
    GroupStats,
    Prompts,
    ReplayRow,
    Row,
    key_of,
)


class Model:
    """The state of a run, over any number of processes, and what every event makes of it."""

    num_prompts: int
    shuffle: bool
    budget: StalenessBudget
    rules: RerollRules
    max_share: float
    max_pending: int
    current: Cut | None
    prompts: Prompts
    version: int
    credit: float
    ready: list[str]
    recorded: list[Cut]
    step: int
    num_trained: int
    table: dict[str, int]
    replaying: ReplaySection | None
    max_replayed: int
    sampled: bool
    last_answer: int  # that cut batches cover
    comparable = True

    def begin_run(self) -> None:
        self.reference = self.new_ledger("reference")
        self.sequence: list[Key] = []  # the first attempts at all prompts, if none were in cooldown
        self.rows: dict[str, Row] = {}
        self.replayed: dict[tuple[int, int], ReplayRow] = {}  # by first step and position
        self.not_replayable: set[str] = set()
        self.cuts: dict[int, Cut] = {}  # by first step
        self.dead: dict[Key, None] = {}
        self.given: dict[str, None] = {}  # every lease there ever was
        self.log: list[tuple[int, Cut]] = []  # what each step of the run, as it stands, trained
        self.checkpoints = [Checkpoint(0, None, Prompts())]
        self.now = 0.0

    def new_ledger(self, session: str) -> PromptLedger:
        limits: dict[str, Any] = {"max_share": self.max_share, "max_pending": self.max_pending}
        attempts = {"data_attempts": ATTEMPTS["data"], "infra_attempts": ATTEMPTS["infra"]}
        return ledger(self.num_prompts, shuffle=self.shuffle, session=session, **limits, **attempts)

    # Prompts

    def key_at(self, index: int) -> Key:
        while len(self.sequence) <= index:
            record = self.reference.lease("p", version=0, policy_floor=0, now=0.0, deadline=1e9)
            self.sequence.append(record.task.key)
        return self.sequence[index]

    def is_fresh(self, key: Key) -> bool:
        self.key_at((key[0] + 1) * self.num_prompts - 1)
        return key in self.sequence[self.prompts.cursor :]

    def is_known(self, key: Key) -> bool:
        return key[0] <= self.prompts.epoch + 1

    def is_wanted(self, key: Key) -> bool:
        return key in self.prompts.open or key in self.prompts.deferred or self.is_fresh(key)

    def is_leased(self, key: Key) -> bool:
        return any(key_of(lease_id) == key for lease_id in self.live)

    def next_turn(self, wanted: Key | None = None) -> Key:
        prompts = self.prompts
        while True:
            key = self.key_at(prompts.cursor)
            if key[0] > prompts.epoch:
                prompts.epoch = key[0]
                prompts.cooldowns = {who: until for who, until in prompts.cooldowns.items() if until >= prompts.epoch}
                if len(prompts.cooldowns) == self.num_prompts:
                    prompts.cooldowns = {}
            prompts.cursor += 1
            if key == wanted or prompts.cooldowns.get(key[1], -1) < key[0]:
                for waiting in [waiting for waiting in prompts.deferred if waiting[1] == key[1]]:
                    del prompts.deferred[waiting]
                    prompts.let_go.add(waiting)
                prompts.open.add(key)
                return key
            prompts.passed_over.add(key)

    def returns(self, key: Key) -> Key:
        self.prompts.returned[key] = self.prompts.deferred.pop(key)
        self.prompts.open.add(key)
        return key

    def reach(self, key: Key) -> None:
        if key in self.prompts.deferred:
            self.again[self.returns(key)] = 0.0
        while self.is_fresh(key):
            self.again[self.next_turn(key)] = 0.0

    def was_leased(self, key: Key) -> None:
        """What goes out again goes first, in some order; then what returns, within its share; then the next turn."""
        due = [again for again, moment in self.again.items() if moment <= self.now and self.may_return(again)]
        if due:
            assert key in due
            del self.again[key]
            return
        waiting = [key for key, version in self.prompts.deferred.items() if version <= self.version]
        is_reroll = self.credit >= 1 and bool(waiting)
        self.credit = min(BURST, self.credit + self.max_share) - is_reroll
        assert key == (self.returns(waiting[0]) if is_reroll else self.next_turn())

    def may_return(self, key: Key) -> bool:
        return self.prompts.returned.get(key, 0) <= self.version

    def goes_out_again(self, key: Key, not_before: float = 0.0) -> None:
        self.prompts.open.add(key)
        if not self.is_leased(key):
            self.again[key] = not_before

    def settle(self, key: Key, verdict: str = "unscored", version: int = 0) -> None:
        prompts = self.prompts
        prompts.held.discard(key)
        prompts.open.discard(key)
        prompts.settled.add(key)
        epoch, prompt_id, reroll = key
        if verdict == "solved" and self.rules.settings.solved_cooldown_epochs:
            until = epoch + self.rules.settings.solved_cooldown_epochs
            prompts.cooldowns[prompt_id] = max(until, prompts.cooldowns.get(prompt_id, 0))
        if verdict != "failed" or reroll == self.rules.settings.max_attempts:
            return
        returning = Key(epoch, prompt_id, reroll + 1)
        if returning in prompts.answered:
            prompts.answered.remove(returning)
        elif not self.is_fresh(Key(epoch + 1, prompt_id, 0)):
            prompts.let_go.add(returning)
        else:
            while len(prompts.deferred) >= self.max_pending:
                too_many = next(iter(prompts.deferred))
                del prompts.deferred[too_many]
                prompts.let_go.add(too_many)
            prompts.deferred[returning] = version + self.rules.settings.delay_versions

    # Groups

    def judge(self, arriving: Iterable[GroupStats]) -> list[str]:
        expected: list[str] = []
        answered: set[Key] = set()
        seen: set[str] = set(self.rows)
        for lease_id, version, rewards in arriving:
            key = key_of(lease_id)
            if not self.is_known(key):
                expected.append("unknown_lease")
            elif lease_id in seen or key in answered or not self.is_wanted(key):
                expected.append("duplicate")
            elif version < self.budget.oldest_usable(self.next_step):
                expected.append("stale")
                seen.add(lease_id)
            else:
                expected.append(REWARDS[rewards][0])
                seen.add(lease_id)
                answered.add(key)
        return expected

    def admit(self, arrival: GroupStats, outcome: str) -> None:
        lease_id, version, rewards = arrival
        key, verdict = key_of(lease_id), REWARDS[rewards][1]
        self.rows[lease_id] = Row(lease_id, version, outcome, verdict)
        self.reach(key)
        self.live.pop(lease_id, None)
        self.again.pop(key, None)
        self.prompts.open.discard(key)
        if outcome == "stale":
            self.goes_out_again(key)
        elif outcome == "no_signal":
            self.settle(key, verdict, version)
        else:
            self.prompts.held.add(key)
            self.ready.append(lease_id)

    # Batches

    @property
    def answers(self) -> list[str]:
        """All that came in time, in order."""
        return [row.lease_id for row in self.rows.values() if row.outcome != "stale"]

    @property
    def least_signal(self) -> int:
        size = self.budget.groups_per_step
        return min(size, max(2, math.ceil(size / 4))) if self.sampled else size

    def window(self, covered: int, ready: list[str]) -> tuple[int, list[str]] | None:
        """Go from answer to answer behind those that are covered, until a batch of some of the ready groups is due."""
        size, answers = self.budget.groups_per_step, self.answers
        for last in range(covered + size, len(answers) + 1):
            batch = [lease_id for lease_id in ready if lease_id in answers[:last]]
            is_late = self.sampled and batch and last - covered >= 2 * size
            if is_late or len(batch) >= self.least_signal:
                return last, batch
        return None

    @property
    def places_taken(self) -> int:
        """All places of batches that are due; of the next one, those that answers so far have or that it may not need."""
        size = self.budget.groups_per_step
        taken = sum(size if self.sampled else cut.num_fresh for cut in self.recorded)
        covered, ready = self.last_answer, self.ready
        while due := self.window(covered, ready):
            covered, ready, taken = due[0], ready[len(due[1]) :], taken + size
        if not self.sampled:
            return taken + len(ready)
        uncovered = len(self.answers) - covered
        lacking = min(self.least_signal - len(ready), 2 * size - uncovered)
        return taken + size - max(size - uncovered, lacking, 1)

    def floor_of_leases(self) -> int:
        """The next batch may need all its groups, one after it fewer where groups are replayed more often than others come."""
        size = places = self.budget.groups_per_step
        if self.replaying is not None and not self.sampled:
            least = math.ceil(places / self.replaying.samples_per_insert)
            places = min(places, max(least, places - self.max_replayed))
        pending = len(self.live) + self.places_taken
        batches_ahead = 0 if pending < size else 1 + (pending - size) // places
        return max(0, self.budget.oldest_usable(self.next_step + batches_ahead * self.budget.num_iterations))

    def next_cut(self) -> Cut | None:
        oldest_usable = self.budget.oldest_usable(self.next_step)
        for lease_id in [lease_id for lease_id in self.ready if self.rows[lease_id].version < oldest_usable]:
            self.rows[lease_id].dropped = "stale"
            self.ready.remove(lease_id)
            self.prompts.held.remove(key_of(lease_id))
            self.goes_out_again(key_of(lease_id))
        if self.recorded:
            return self.recorded.pop(0)
        size = self.budget.groups_per_step
        due = self.window(self.last_answer, self.ready)
        last_answer, fresh = due or (self.answers.index(self.ready[-1]) + 1 if self.ready else 0, self.ready)
        again, forgotten = self.next_replays(size - len(fresh)) if fresh else ([], 0.0)
        if not fresh or not (due or (not self.sampled and len(fresh) + len(again) == size)):
            return None
        self.forgotten = forgotten
        self.ready = self.ready[len(fresh) :]
        last = self.next_step + self.budget.num_iterations
        return Cut(self.next_step + 1, last, fresh + again, len(fresh), last_answer)

    def next_replays(self, missing: int) -> tuple[list[str], float]:
        """And the places that nothing will take any more: more than one batch of them is not kept."""
        if self.replaying is None:
            return [], 0.0
        rate = self.replaying.samples_per_insert
        inserts = sum(row.outcome != "stale" for row in self.rows.values())
        samples = self.num_trained + self.budget.groups_per_step - missing
        forgotten = max(self.forgotten, inserts - (samples + self.budget.groups_per_step) / rate)
        usable = [lease_id for lease_id in self.table if self.age(lease_id, self.next_step) <= self.max_age]
        if len(usable) < self.replaying.min_size:
            return [], forgotten
        allowed = int(max(0.0, rate * (inserts - forgotten) - samples))
        return usable[: min(missing, self.max_replayed, allowed)], forgotten

    @property
    def max_age(self) -> int:
        return self.replaying.max_age_versions if self.replaying else 0

    def age(self, lease_id: str, step: int) -> int:
        return self.budget.version_at(step) - self.rows[lease_id].version

    def was_cut(self, cut: Cut) -> None:
        self.cuts[cut.first] = self.current = cut
        self.last_answer = max(self.last_answer, cut.last_answer)
        self.next_step = cut.last
        self.num_trained += len(cut.ids)
        for position, lease_id in enumerate(cut.fresh):
            row = self.rows[lease_id]
            row.claim, row.tries = (cut.first, cut.last, position), row.tries + 1
            if key_of(lease_id) in self.prompts.held:
                self.settle(key_of(lease_id), row.verdict, row.version)
        for position, lease_id in enumerate(cut.again, start=cut.num_fresh):
            self.replayed.setdefault((cut.first, position), ReplayRow(cut.last, lease_id)).tries += 1
        if self.replaying is None or self.step >= cut.first:
            return
        for lease_id in set(cut.again) & set(self.table):
            self.table[lease_id] += 1
            if self.table[lease_id] == self.replaying.max_times_sampled:
                del self.table[lease_id]
        for lease_id in cut.fresh:
            self.table[lease_id] = 1
            if len(self.table) > self.replaying.max_size:
                del self.table[next(iter(self.table))]
        self.table = {g: times for g, times in self.table.items() if self.age(g, cut.last) <= self.max_age}

    def step_ended(self) -> None:
        """The claims of what was trained to its end count no tries any more."""
        for row in self.rows.values():
            if row.claim and row.claim[1] == self.step and not row.dropped:
                row.tries = 0
        for replay_of_it in self.replayed.values():
            if replay_of_it.last == self.step:
                replay_of_it.tries = 0

    # The next process

    def recover(self, checkpoint: Checkpoint) -> None:
        """What of the journal comes back, and where that leaves every prompt."""
        self.live: dict[str, tuple[str, float]] = {}  # producer and deadline
        self.again: dict[Key, float] = {}
        self.credit = 0.0
        self.current = None
        self.step, self.num_trained = checkpoint.step, checkpoint.num_trained
        self.forgotten = 0.0
        self.version = self.budget.version_at(self.step)
        self.prompts = copy.deepcopy(checkpoint.prompts)
        self.prompts.open |= self.prompts.held
        self.prompts.held = set()
        self.log = [(step, cut) for step, cut in self.log if step <= self.step]
        for row in self.rows.values():
            if self.is_available(row) and row.tries >= 2:
                row.dropped = "quarantined"
            elif self.is_available(row) and not self.comparable and not (row.claim and row.claim[0] <= self.step):
                row.dropped = "configuration"
        self.not_replayable |= {s.lease_id for s in self.replayed.values() if s.last > self.step and s.tries >= 2}
        self.recorded = self.recut()
        recorded = {lease_id for cut in self.recorded for lease_id in cut.ids}
        self.ready = [row.lease_id for row in self.rows.values() if self.is_available(row)]
        self.ready = [lease_id for lease_id in self.ready if lease_id not in recorded]
        self.next_step = self.recorded[0].first - 1 if self.recorded else self.step
        first_ready = self.answers.index(self.ready[0]) if self.ready else len(self.answers)
        self.last_answer = min(first_ready, self.recorded[-1].last_answer if self.recorded else checkpoint.last_answer)
        if not self.comparable:
            self.last_answer = len(self.answers)
        self.table = {
            lease_id: times
            for lease_id, times in (checkpoint.table if self.comparable else {}).items()
            if lease_id not in self.not_replayable and not self.rows[lease_id].dropped
        }
        for index, row in enumerate(self.rows.values()):
            self.take_to_its_place(row, is_new=index >= checkpoint.num_rows)
        for key in self.dead:
            if self.recall(key, is_new=True):
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
            missing = self.budget.groups_per_step - len(cut.ids)
            fits = missing == 0 or (self.sampled and missing > 0)
            fits = fits and cut.last - first + 1 == self.budget.num_iterations
            usable = self.comparable and not any(self.rows[lease_id].dropped for lease_id in cut.fresh)
            broken = broken or not fits or not usable
            if broken:
                self.undo(cut)
            else:
                standing.append(cut)
        return standing

    def undo(self, cut: Cut) -> None:
        """What a checkpoint has of it stays trained."""
        begun = cut.first <= self.step
        for position, row in enumerate(self.rows[lease_id] for lease_id in cut.fresh):
            if begun:
                row.claim = (cut.first, self.step, position)
            elif not row.dropped:
                row.claim = None
        for position in range(cut.num_fresh, len(cut.ids)):
            if begun:
                self.replayed[cut.first, position].last = self.step
            else:
                del self.replayed[cut.first, position]
        if begun:
            self.cuts[cut.first] = Cut(cut.first, self.step, cut.ids, cut.num_fresh, cut.last_answer)
        else:
            del self.cuts[cut.first]

    def recall(self, key: Key, *, is_new: bool) -> bool:
        """Whether it is open now; if it had its group after the checkpoint, it was then."""
        self.reach(key)
        if is_new and key not in self.prompts.open | self.prompts.held:
            self.prompts.open.add(key)
            if key[2] > 0:
                self.prompts.answered.add(key)
        return key in self.prompts.open

    def take_to_its_place(self, row: Row, *, is_new: bool) -> None:
        key, goes_again = key_of(row.lease_id), row.outcome == "stale" or row.dropped in ("stale", "configuration")
        if not (is_new or self.is_available(row) or row.dropped == "quarantined"):
            return
        if not self.recall(key, is_new=is_new and not goes_again) or goes_again:
            return
        if self.is_available(row):
            self.prompts.open.remove(key)
            self.prompts.held.add(key)
        else:
            self.settle(key, row.verdict, row.version)
