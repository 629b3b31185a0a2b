"""Leases of held-out prompts beside those for training; then all of an evaluation's bookkeeping under crashes at any point."""

import dataclasses
import json
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from consumer.evaluate.control import EvaluationControl
from consumer.evaluate.evaluation import Metric
from consumer.evaluate.leases import EvaluationLeases, EvaluationRules, Progress
from consumer.evaluate.results import EvaluationQueue, EvaluationResults
from consumer.link.policy_store import PolicyStore, PublishedPolicy
from consumer.link.sessions import ProducerSession
from consumer.prompts.completion_limit import CompletionLimit
from consumer.waiting import WaitPolicy
from protocol.channel.channel import ReceivedGroup
from protocol.errors import DatasetError
from protocol.runtime.scratch import NO_MEMORY
from protocol.wire.codec import encode
from protocol.wire.messages import (
    Ack,
    BlobMissing,
    BlobRequest,
    Heartbeat,
    Lease,
    Nack,
    PolicyRequest,
    Sampling,
)
from replay.groups import GroupShape
from replay.lease_ids import EvaluationLeaseId
from replay.prompt_table import RetryBudget
from replay.sources import Sources
from tests.scripted import made_up_group
from tests.unit.consumer.evaluate.test_results import blob, section
from tests.unit.replay.builders import memory_folder

BUDGETS = {"data": RetryBudget(2, 0.0), "infra": RetryBudget(3, 0.0)}
NUM_PROMPTS = 6


class Prompts:
    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        if prompt_id == 5:
            raise DatasetError("row 5 has no prompt")
        return f"{prompt_id}=", {"answer": prompt_id}


def policy(version: int) -> PublishedPolicy:
    data, digest = blob(version)
    return PublishedPolicy(version, digest, data)


class Process:
    """The evaluations of one trainer process, and producers that may be given leases."""

    def __init__(
        self, folder: Path, session: str = "s", *, first_step: int = 0, per_place: int = 4, **values: Any
    ) -> None:
        self.sent: deque[tuple[bytes, Lease]] = deque()
        self.unreachable: set[bytes] = set()
        self.said: list[str] = []
        self.warned: list[str] = []
        self.logged: list[Mapping[str, float]] = []
        self.now = 0.0
        self.prompts = Prompts()
        self.store = PolicyStore(2, NO_MEMORY)
        channel: Any = SimpleNamespace(send=self.send, wake=lambda: None)
        options = section(**({"every_versions": 2} | values))
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.results = EvaluationResults(folder, folder / "checkpoints", options, first_step, 0.5)
        self.due = EvaluationQueue(folder)
        self.due.restore(first_step, self.results.versions)
        metric, shape = Metric(np.ones(1, np.float32)), GroupShape(1, 1, 6, 64)
        rules = EvaluationRules(NUM_PROMPTS, Sampling(1, 6, 0.0), metric, shape, BUDGETS, per_place, 10.0, session)
        self.leases = EvaluationLeases(
            self.store,
            channel,
            self.due,
            self.prompts,
            rules,
            lambda kind, text: self.warned.append(kind),
            lambda: self.now,
        )
        self.control = EvaluationControl(
            options, self.due, self.results, self.leases, run_dir=folder, reward_names=("reward",), last_version=7,
            say=lambda text, **fields: self.said.append(text),
        )  # fmt: skip
        self.sessions = {b"p": ProducerSession("p", 3, 0.0, evaluates=True)}

    def send(self, peer: bytes, lease: Lease) -> bool:
        self.sent.append((peer, lease))
        return peer not in self.unreachable

    def publish(self, version: int) -> None:
        self.control.submit(policy(version), version * 10)
        self.store.publish(policy(version))

    def collect(self) -> None:
        self.control.collect(self.logged.append)

    def tick(self) -> list[bytes]:
        return self.leases.tick(self.sessions.items(), self.now)

    def answer(self, lease: Lease, reward: float = 1.0, version: int | None = None) -> Ack | Nack:
        assert lease.evaluates is not None
        group = made_up_group(lease, lease.evaluates.version if version is None else version, rewards=[reward])
        answer = self.leases.receive(self.sessions[b"p"], ReceivedGroup(group, encode(group)))
        assert answer is not None
        return answer

    def answer_all(self, reward: float = 1.0) -> None:
        self.tick()
        while self.sent:
            self.answer(self.sent.popleft()[1], reward)
            self.tick()


def test_completions_of_a_row_have_its_own_limit(tmp_path: Path) -> None:
    process, limits = Process(tmp_path), {}
    process.leases.rules = dataclasses.replace(process.leases.rules, limit=CompletionLimit("answer", 3))
    process.publish(0)
    process.tick()
    while process.sent:
        lease = process.sent.popleft()[1]
        limits[lease.columns["answer"]] = lease.sampling.max_completion_length
        process.answer(lease)
        process.tick()
    assert limits == {1: 1, 2: 2, 3: 3, 4: 3}
    assert "bad_prompt" in process.warned, "0 is no limit"


def test_each_source_has_a_score_of_its_own(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.control.sources = Sources(("a", "b", "c"), (0, 2, 4))
    process.publish(0)
    process.tick()
    rewards = {0: 1.0, 1: 0.5, 2: 0.0, 3: 1.0, 4: 0.25}  # row 5 has no prompt
    while process.sent:
        lease = process.sent.popleft()[1]
        process.answer(lease, rewards[EvaluationLeaseId.parse(lease.lease_id).prompt_id])
        process.tick()
    process.collect()
    result = json.loads((tmp_path / "evaluations.jsonl").read_text())
    assert result["sources"] == {
        "a": {"score": 0.75, "num_prompts": 2, "num_scored": 2},
        "b": {"score": 0.5, "num_prompts": 2, "num_scored": 2},
        "c": {"score": 0.25, "num_prompts": 2, "num_scored": 1},
    }
    assert (result["mean_of_sources"], result["score"]) == (0.5, 0.55)
    [logged] = process.logged
    assert logged["evaluation/sources/b"] == logged["evaluation/mean_of_sources"] == 0.5


def test_an_evaluation_from_lease_to_line(tmp_path: Path) -> None:
    process = Process(tmp_path)
    for version in (0, 1):
        process.publish(version)
    process.tick()
    peer, lease = process.sent[0]
    assert (peer, lease.lease_id, lease.prompt, lease.columns) == (b"p", "evaluation-0-0-1-s", "0=", {"answer": 0})
    assert (lease.policy_floor, lease.evaluates and lease.evaluates.digest) == (0, blob(0)[1])
    assert (lease.sampling.num_generations, lease.sampling.temperature) == (1, 0.0)
    assert process.leases.progress == Progress(0, 1, NUM_PROMPTS, 5), "the row without a prompt is given up"
    rewards = iter([1.0, 0.0, 0.5, 1.0, 0.0])
    while process.sent:
        answer = process.answer(process.sent.popleft()[1], next(rewards))
        assert isinstance(answer, Ack)
        assert answer.outcome == "accepted"
        process.tick()
    assert process.leases.progress == Progress()
    process.collect()
    (line,) = map(json.loads, (tmp_path / "evaluations.jsonl").read_text().splitlines())
    assert (line["version"], line["step"], line["score"]) == (0, 0, 0.5)
    assert (line["num_prompts"], line["num_scored"], line["rewards"]) == (6, 5, {"reward": 0.5})
    assert process.said == [
        "evaluation of v0 (step 0): mean reward 0.5 (6 prompts, 0.0 s, 1 without a score, the best so far)"
    ]
    assert process.logged[0]["evaluation/score"] == 0.5
    assert process.control.totals == {"scored": 1}
    process.publish(2)
    process.answer_all(0.25)
    process.collect()
    assert process.said[1:] == [
        "evaluation of v2 (step 20): mean reward 0.25 (6 prompts, 0.0 s, 1 without a score, best 0.5)"
    ]


def test_a_version_is_announced_from_before_it_is_published_until_its_evaluation_is_over(tmp_path: Path) -> None:
    process = Process(tmp_path)
    announced = []
    for version in (0, 2):
        process.publish(version)
        announced.append(process.leases.policy)
    process.answer_all()
    announced.append(process.leases.policy)
    process.collect()
    process.answer_all()
    announced.append(process.leases.policy)
    assert announced == [policy(0).info, policy(0).info, policy(2).info, None]


def test_training_goes_first_and_an_evaluation_gets_on_all_the_same(tmp_path: Path) -> None:
    process = Process(tmp_path, per_place=2)
    busy, idle, old = (ProducerSession(name, 3, 0.0, evaluates=name != "old") for name in ("busy", "idle", "old"))
    busy.leases |= {"a", "b", "c"}
    idle.leases |= {"d"}
    process.sessions = {b"busy": busy, b"idle": idle, b"old": old}
    process.publish(0)
    process.tick()
    given = [peer for peer, _ in process.sent]
    assert (given.count(b"busy"), given.count(b"idle"), given.count(b"old")) == (2, 3, 0)
    assert [busy.room, idle.room] == [0, 2], "no place for training is taken"


def test_a_producer_that_will_never_serve_the_evaluated_version_gets_none_of_it(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.sessions[b"q"] = ProducerSession("q", 3, 0.0, evaluates=True)
    for name, refused in ((b"p", 1), (b"q", 0)):
        process.sessions[name].heartbeat = Heartbeat(-1, 3, [], 0, 0.0, refused_version=0, num_refused=refused)
    process.publish(0)
    process.tick()
    assert {peer for peer, _ in process.sent} == {b"q"}


def test_an_answer_must_be_of_the_evaluated_version_alone(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.publish(0)
    process.tick()
    lease = process.sent[0][1]
    refused = process.answer(lease, version=1)
    assert isinstance(refused, Nack)
    assert refused.detail == "it is not of policy v0 alone, which is evaluated"
    process.sent.clear()
    process.tick()
    assert [lease.lease_id for _, lease in process.sent] == ["evaluation-0-0-2-s"]
    assert process.answer(process.sent[0][1]) == Ack("evaluation-0-0-2-s", "accepted", process.store.newest)
    assert process.answer(lease) == Ack(lease.lease_id, "duplicate", process.store.newest)


def test_an_answer_to_an_evaluation_before_this_one_comes_late_and_is_not_invalid(tmp_path: Path) -> None:
    process = Process(tmp_path, every_versions=1)
    process.publish(0)
    process.tick()
    late = process.sent[0][1]
    process.now = 11.0  # it is given up, and goes out again
    process.answer_all()
    process.collect()
    process.publish(1)
    process.tick()
    assert process.leases.progress.version == 1
    assert process.answer(late) == Ack(late.lease_id, "duplicate", process.store.newest)
    of_another_process = replace(process.sent[0][1], lease_id="evaluation-0-0-1-before")
    assert process.answer(of_another_process, version=0) == Ack(
        "evaluation-0-0-1-before", "duplicate", process.store.newest
    )
    assert "invalid" not in process.warned


def test_leases_that_are_lost_go_out_again(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.publish(0)
    process.tick()
    session = process.sessions[b"p"]
    first, second, third, *_ = sorted(session.evaluations)
    beat = Heartbeat(0, 3, [lease for lease in session.evaluations if lease != first], 0, 0.0)
    assert session.note(beat, 2.0) == set()
    session.last_heard += 2.0
    assert session.note(beat, 2.0) == {first}
    assert process.leases.release("p", keep=session.evaluations) == session.evaluations
    process.leases.receive(session, Nack(second, "returned"))
    process.leases.receive(session, Nack(third, "generation_failed", "no"))
    process.sent.clear()
    process.tick()
    assert {lease.lease_id for _, lease in process.sent} == {
        "evaluation-0-0-2-s", "evaluation-0-1-2-s", "evaluation-0-2-2-s",
    }  # fmt: skip
    process.now = 11.0
    process.sent.clear()
    process.tick()
    assert len(process.sent) == 5, "all had run into their deadlines"
    process.unreachable = {b"p"}
    process.leases.release("p")
    assert process.tick() == [b"p"]
    assert process.warned.count("evaluation_generation_failed") == 1
    assert "evaluation_returned" not in process.warned, "that is no failure"


def test_what_is_evaluated_stays_in_the_store(tmp_path: Path) -> None:
    process = Process(tmp_path)
    for version in range(2):
        process.publish(version)
    process.tick()
    for version in range(2, 6):
        process.publish(version)
    digests = [blob(version)[1] for version in range(6)]
    there = [not isinstance(process.store.offer(PolicyRequest(digest)), BlobMissing) for digest in digests]
    assert there == [True, False, False, False, True, True]
    process.answer_all()
    assert isinstance(process.store.offer(PolicyRequest(digests[0])), BlobMissing)
    process.collect()
    process.tick()
    chunk: Any = process.store.chunk(BlobRequest(digests[4], 0, 1000))
    assert chunk.data == blob(4)[0], "v2 was skipped"


def test_the_store_takes_one_that_is_only_in_its_file(tmp_path: Path) -> None:
    Process(tmp_path).publish(2)
    process = Process(tmp_path, "t", first_step=30)
    process.publish(3)
    process.tick()
    chunk: Any = process.store.chunk(BlobRequest(blob(2)[1], 0, 1000))
    assert (chunk.data, process.store.newest.version) == (blob(2)[0], 3)
    process.store.publish(policy(4))
    process.store.publish(policy(5))
    assert not isinstance(process.store.offer(PolicyRequest(blob(2)[1])), BlobMissing)
    process.store.unpin()
    assert isinstance(process.store.offer(PolicyRequest(blob(2)[1])), BlobMissing)


@pytest.mark.long
def test_the_end_of_the_run_waits_for_the_last_version_and_not_for_ever(tmp_path: Path) -> None:
    process = Process(tmp_path, before_training=False, wait_s=1.0)
    process.publish(6)
    process.publish(7)

    def work() -> None:
        process.tick()
        if process.sent:
            process.answer(process.sent.popleft()[1])

    waits = WaitPolicy(check=work, say=print, stall_timeout_s=0.01)
    process.control.wait_for_last(waits, lambda: "", process.logged.append)
    assert process.results.versions == [6, 7], "the last one although 7 is odd"
    process = Process(tmp_path, "t", first_step=70, before_training=True, wait_s=1.0)
    process.publish(0)
    alone = WaitPolicy(check=lambda: None, say=print, stall_timeout_s=9.0)
    process.control.wait_for_last(alone, lambda: "nobody is there", process.logged.append)
    [said] = process.said
    assert said == "the evaluation of v0 is given up after evaluation.wait_s without an answer: nobody is there"
    assert process.due.versions == [0], "--resume takes it up"


@pytest.mark.long
def test_prompts_of_an_environment_that_is_skipped_are_left_out_and_scores_are_compared_with_such(
    tmp_path: Path,
) -> None:
    process = Process(tmp_path, patience=2)

    def evaluate(version: int, reward: float) -> dict[str, Any]:
        process.publish(version)
        process.tick()
        while process.sent:
            lease = process.sent.popleft()[1]
            process.answer(lease, reward)
            process.tick()
        process.collect()
        return process.control.last or {}

    assert "without" not in evaluate(0, 1.0)
    process.leases.skipped = lambda: frozenset({"odd"})
    process.leases.prompts.environment_of = lambda prompt_id: "odd" if prompt_id % 2 else "even"  # type: ignore[method-assign]
    first = evaluate(2, 0.25)
    assert (first["without"], first["num_prompts"], first["score"]) == (["odd"], (NUM_PROMPTS + 1) // 2, 0.25)
    assert "odd" in process.said[-1]
    assert (process.results.best_score, best_version(process.results)) == (0.25, 2), "1.0 was of all"
    evaluate(4, 0.25)
    assert process.results.num_without_improvement == 1
    process.leases.skipped = frozenset
    assert "without" not in evaluate(6, 0.0)
    assert (process.results.best_score, process.results.num_without_improvement) == (0.0, 0)
    again = EvaluationResults(tmp_path, tmp_path / "checkpoints", process.control.section, 70, 0.5)
    assert (again.best_score, best_version(again)) == (0.0, 6)
    process.leases.skipped = lambda: frozenset({"odd", "even"})
    assert (evaluate(8, 1.0)["score"], process.control.totals["incomplete"]) == (None, 1)


def best_version(results: EvaluationResults) -> int | None:
    return results.best["version"] if results.best else None


@pytest.mark.parametrize(("version", "due"), [(0, False), (1, False), (2, True), (3, False), (4, True), (7, True)])
def test_which_versions_are_due(tmp_path: Path, version: int, due: bool) -> None:
    process = Process(tmp_path, before_training=False)
    process.publish(version)
    assert process.due.versions == ([version] if due else [])


class Crashes(RuleBasedStateMachine):
    """A trainer that evaluates every second version, checkpoints when it likes and dies when it likes. The score of a version
    is a function of the version, as it is when greedy completions of equal weights are scored."""

    SCORES = (0.5, 0.0, 0.75, 0.0, 0.25, 0.0, 0.75, 0.0, 1.0, 0.0)

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = self.stack.enter_context(memory_folder())
        self.checkpoint = 0
        self.version = -1
        self.sessions = 0
        self.best = -1.0
        self.start()

    def start(self) -> None:
        self.sessions += 1
        self.process = Process(self.folder, f"s{self.sessions}", first_step=self.checkpoint * 10, per_place=2)
        self.version = self.checkpoint
        self.process.publish(self.version)

    @rule()
    def step(self) -> None:
        if self.version < len(self.SCORES) - 1:
            self.version += 1
            self.process.publish(self.version)

    @rule()
    def commit(self) -> None:
        self.checkpoint = self.version

    @rule(count=st.integers(1, 8))
    def answer(self, count: int) -> None:
        self.process.tick()
        for _ in range(min(count, len(self.process.sent))):
            lease = self.process.sent.popleft()[1]
            assert lease.evaluates.digest == blob(lease.evaluates.version)[1]
            self.process.answer(lease, self.SCORES[lease.evaluates.version])
            self.process.tick()

    @rule()
    def collect(self) -> None:
        before = list(self.process.results.versions)
        self.process.collect()
        for version in self.process.results.versions[len(before) :]:
            self.best = max(self.best, self.SCORES[version])

    @rule(half_renamed=st.booleans())
    def die(self, half_renamed: bool) -> None:
        best = self.folder / "checkpoints" / "best"
        if half_renamed and best.exists():
            best.rename(best.with_name(".best.old"))
        self.start()

    @invariant()
    def holds(self) -> None:
        file = self.folder / "evaluations.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        versions = [line["version"] for line in lines]
        assert versions == sorted(set(versions)), "each once, in order"
        assert all(line["score"] == self.SCORES[line["version"]] for line in lines)
        assert all(version <= self.version for version in versions), "none of a version that is not"
        assert versions == self.process.results.versions
        assert len(self.process.due.versions) <= 2
        best = self.process.results.best
        assert (best["score"] if best else -1.0) == self.best
        if best:
            weights = (self.folder / "checkpoints" / "best" / "adapter_model.safetensors").read_bytes()
            assert weights == b"weights of v%d" % best["version"]

    def teardown(self) -> None:
        """What is due gets its line in the end."""
        due = list(self.process.due.versions)
        for _ in range(4):
            while self.process.sent or self.process.leases.progress != Progress():
                self.answer(8)
            self.process.tick()
            self.collect()
            self.process.tick()
        assert self.process.due.versions == []
        assert set(due) <= set(self.process.results.versions)
        self.holds()
        self.stack.close()


TestCrashes = pytest.mark.long(Crashes.TestCase)
TestCrashes.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
