"""A run goes on without an environment that fails (`on_failure: skip`): which, when, what the journal says, what comes back."""

import contextlib
import json
import logging
from collections import defaultdict
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.config.data import CurriculumSection
from protocol.errors import DataFailuresError, ExitCode
from replay.buffer import EnvironmentState, RolloutBuffer
from replay.curriculum import Curriculum
from replay.journal.writer import Journal, JournalFullError
from replay.lease_ids import Key, LeaseId
from replay.prompt_draws import PromptDraws
from replay.shares import EnvironmentShares
from replay.staleness import StalenessBudget
from replay.watches import FailureWatch
from tests.unit.replay.builders import FillableJournal, buffer, lease, memory_folder, offer, resumed

NAMES = ("a", "b", "c")
SIZE = 300


def environment_of(prompt_id: int) -> str:
    return NAMES[prompt_id % len(NAMES)]


def watch(*may_skip: str, names: tuple[str, ...] = NAMES, max_share: float = 0.5) -> FailureWatch:
    return FailureWatch(max_share, names, may_skip)


def run(journal: Journal, *may_skip: str, **arguments: object) -> RolloutBuffer:
    """A run of three environments in turn, each failure of which is a dead letter."""
    values = {"num_prompts": SIZE, "data_attempts": 1, "max_staleness": 10**6, "environment_of": environment_of}
    return buffer(journal, **(values | {"failures": watch(*may_skip)} | arguments))


def environment(lease_id: str) -> str:
    return environment_of(LeaseId.parse(lease_id).key.prompt_id)


def play(replay: RolloutBuffer, count: int, *failing: str) -> list[str]:
    """Lease prompts and answer them, or fail those of environments that are failing. Return their environments."""
    found = []
    for _ in range(count):
        lease_id = lease(replay)
        found.append(environment(lease_id))
        if found[-1] in failing:
            replay.fail(lease_id, "reward_failed", f"of {found[-1]}", 0.0)
        else:
            offer(replay, lease_id, signal=False)
    return found


def test_after_sixteen_in_a_row_the_others_go_on_alone(
    journal: FillableJournal, caplog: pytest.LogCaptureFixture
) -> None:
    replay = run(journal, "a")
    early = [lease(replay) for _ in range(3)]
    assert set(play(replay, 45, "a")) == set(NAMES), "15 of them"
    assert replay.environments()["a"] == EnvironmentState(1, False)
    with caplog.at_level(logging.ERROR):
        play(replay, 3, "a")
    [said] = [record.getMessage() for record in caplog.records]
    assert [word for word in ("environments.a", "16", "reward_failed: of a", "--resume") if word not in said] == []
    assert json.loads(journal.facts()["skipped_environments"])["a"][:3] == [16, 16, "reward_failed: of a"]
    assert set(play(replay, 100, "a")) == {"b", "c"}
    assert offer(replay, early[0]) == "accepted", "what was in flight counts"
    assert replay.next_batch(0.0) is None, "16 of the last 100 and more prompts are no reason to end"
    assert replay.environments() == {"a": (0, True), "b": (1, False), "c": (1, False)}


def test_a_share_of_the_last_64_is_enough_and_one_group_breaks_a_row(journal: FillableJournal) -> None:
    found = watch("a")
    for number in range(64):
        found.note("a", None if number % 15 == 0 else "reward_failed: it raised\n  Traceback:\n  KeyError: 'a'\n")
        assert bool(list(found.due())) == (number == 63)
    [(name, skip)] = found.due()
    assert (name, *skip[:3]) == ("a", 59, 64, "reward_failed: it raised: KeyError: 'a'")
    lenient = watch("a", max_share=1.0)
    for number in range(64):
        lenient.note("a", None if number % 15 == 0 else "reward_failed: x")
    assert list(lenient.due()) == []


def test_what_may_be_skipped_does_not_count_for_the_run_and_others_do(journal: FillableJournal) -> None:
    replay = run(journal, "a")
    play(replay, 48 + 31, "a", "b", "c")
    assert replay.next_batch(0.0) is None, "16 of a, and 63 of the others"
    play(replay, 1, "a", "b", "c")
    with pytest.raises(DataFailuresError, match="max_failed_share"):
        replay.next_batch(0.0)
    assert list(replay.failures.skipped) == ["a"]


def test_the_last_one_ends_the_run_as_failed_prompts_do(journal: FillableJournal) -> None:
    replay = run(journal, *NAMES)
    play(replay, 48, "a", "b")
    assert set(play(replay, 15, "c")) == {"c"}
    assert replay.next_batch(0.0) is None
    play(replay, 1, "c")
    with pytest.raises(DataFailuresError, match=r"a, b.*of c were given up.*reward_failed: of c") as caught:
        replay.next_batch(0.0)
    assert caught.value.exit_code == ExitCode.DATA_FAILURES
    assert list(replay.failures.skipped) == ["a", "b"]


def test_its_places_go_to_the_others(journal: FillableJournal) -> None:
    shares = EnvironmentShares({"a": 0.5, "b": 0.3, "c": 0.2}, StalenessBudget(8, 2))
    left = shares.without("a")
    assert left.parts == pytest.approx({"b": 0.6, "c": 0.4})
    assert left.places(10, {"a": 900, "b": 60, "c": 40}, {}) == pytest.approx({"b": 6, "c": 4})
    replay = run(journal, "a", shares=EnvironmentShares(dict.fromkeys(NAMES, 1 / 3), StalenessBudget(2, 10**6)))
    play(replay, 48, "a")
    assert replay.shares is not None
    assert replay.shares.parts == pytest.approx({"b": 0.5, "c": 0.5})
    found = [replay.lease("p", now=0.0, timeout_s=9.0, capacity=10) for _ in range(10)]
    assert sorted(environment(each.lease_id) for each in found if each) == ["b"] * 5 + ["c"] * 5


def test_on_a_full_disk_the_next_prompt_decides(journal: FillableJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = run(journal, "a")
    play(replay, 45, "a")
    held = [lease(replay) for _ in range(6)]

    def refuse(facts: dict[str, str]) -> None:
        raise JournalFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "note_facts", refuse)
        replay.fail(held[0], "reward_failed", "", 0.0)
    assert not replay.failures.skipped
    replay.fail(held[3], "reward_failed", "", 0.0)
    assert list(replay.failures.skipped) == ["a"]


def test_a_run_whose_curriculum_opens_nothing_else_ends(journal: FillableJournal) -> None:
    level = Curriculum(CurriculumSection(), [0, 1], lambda prompt_id: int(environment_of(prompt_id) != "a"))
    replay = run(journal, "a", draws=PromptDraws(journal, None, 0, level))
    assert set(play(replay, 16, "a")) == {"a"}
    with pytest.raises(DataFailuresError, match="curriculum"):
        lease(replay)


class SkippingRun(RuleBasedStateMachine):
    """A run whose prompts fail as they like, with checkpoints and deaths, beside a second account of what is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = ExitStack()
        self.folder = self.exits.enter_context(memory_folder())
        self.journal = FillableJournal(self.folder / "journal.sqlite")
        self.state: dict | None = None
        self.sessions = 0
        self.done: set[Key] = set()
        self.exempt: set[tuple[int, str]] = set()  # epochs in which an environment was skipped

    @initialize(may_skip=st.sets(st.sampled_from(NAMES)))
    def begin(self, may_skip: set[str]) -> None:
        self.may_skip = may_skip
        self.start()

    def start(self) -> None:
        self.sessions += 1
        self.replay = resumed(
            self.journal, self.state, 0, version=0, session=f"s{self.sessions}", num_prompts=SIZE, data_attempts=1,
            max_staleness=10**6, environment_of=environment_of, failures=watch(*self.may_skip),
        )  # fmt: skip
        self.finished: dict[str, list[bool]] = defaultdict(list)
        self.skipped: set[str] = set()
        self.out: list[str] = []

    def lease(self) -> str:
        record = self.replay.lease("p", now=0.0, timeout_s=1e9)
        assert record is not None
        assert environment(record.lease_id) not in self.skipped
        assert record.task.key not in self.done
        self.out.append(record.lease_id)
        return record.lease_id

    def end(self, lease_id: str, *, fails: bool) -> None:
        self.out.remove(lease_id)
        if fails:
            assert self.replay.fail(lease_id, "environment_failed", "x", 0.0) is False
        else:
            assert offer(self.replay, lease_id, signal=False) == "no_signal"
        key, name = LeaseId.parse(lease_id).key, environment(lease_id)
        self.done.add(key)
        self.finished[name if name in self.may_skip else "run"].append(fails)
        if fails and name in self.may_skip and self.fails(name) and set(NAMES) - self.skipped != {name}:
            self.skipped.add(name)

    def fails(self, name: str) -> bool:
        last = self.finished[name][-64:]
        return (len(last) >= 16 and all(last[-16:])) or (len(last) == 64 and sum(last) > 32)

    @rule(count=st.integers(1, 40), failing=st.sets(st.sampled_from(NAMES)))
    def work(self, count: int, failing: set[str]) -> None:
        for _ in range(count):
            lease_id = self.lease()
            self.end(lease_id, fails=environment(lease_id) in failing)

    @rule(count=st.integers(1, 8))
    def hold(self, count: int) -> None:
        for _ in range(count):
            self.lease()

    @rule(fails=st.booleans())
    def late(self, fails: bool) -> None:
        if self.out:
            self.end(self.out[0], fails=fails)

    @rule()
    def checkpoint(self) -> None:
        self.state = json.loads(json.dumps(self.replay.state()))

    @rule()
    def die(self) -> None:
        with contextlib.closing(self.journal):
            pass
        self.journal = FillableJournal(self.folder / "journal.sqlite")
        self.start()
        assert self.journal.facts().get("skipped_environments", "{}") == "{}", "the next process tries all again"

    @invariant()
    def holds(self) -> None:
        if not self.sessions:
            return
        self.exempt |= {(self.replay.ledger.order.epoch, name) for name in self.skipped}
        assert set(self.replay.failures.skipped) == self.skipped
        assert json.loads(self.journal.facts().get("skipped_environments", "{}")).keys() == self.skipped
        last = self.finished["run"][-64:]
        ends = len(last) == 64 and sum(last) > 32
        ends |= all(name in self.skipped or (name in self.may_skip and self.fails(name)) for name in NAMES)
        with pytest.raises(DataFailuresError) if ends else contextlib.nullcontext():
            self.replay.next_batch(0.0)

    def teardown(self) -> None:
        """No prompt of an environment that is left is lost in its epoch."""
        if self.sessions:
            epoch = self.replay.ledger.order.epoch
            left = {Key(epoch, each) for each in range(SIZE) if (epoch, environment_of(each)) not in self.exempt}
            while self.replay.ledger.order.epoch == epoch:
                self.lease()
            assert left <= self.done | {LeaseId.parse(each).key for each in self.out}
        self.journal.close()
        self.exits.close()


TestSkippingRun = pytest.mark.long(SkippingRun.TestCase)
TestSkippingRun.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
