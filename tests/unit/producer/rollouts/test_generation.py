"""Every lease is answered exactly once, with what the engine sampled or with the reason why not."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from producer.interfaces import Adapter, Completion, LeaseFailure
from producer.metrics import ProducerMetrics
from producer.rollouts.admission import Admission
from producer.rollouts.engine_access import BusyClock, EngineAccess, PolicyGate
from producer.rollouts.finish import Finish
from producer.rollouts.generation import Generation
from producer.rollouts.in_flight import InFlight
from producer.rollouts.plain_rollouts import PlainRollouts
from producer.state import Counters
from protocol.errors import EngineError
from protocol.wire.messages import Group, Nack, Sampling
from tests.policies import registry_of
from tests.scripted_trainer import lease
from tests.unit.producer.loop import settle
from tests.unit.producer.policies.test_adapters import FakeEngine, blob


class SlowEngine(FakeEngine):
    """Holds requests until released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = asyncio.Event()
        self.running = self.most_running = 0
        self.error: Exception | None = None
        self.started_on: list[int] = []

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event
    ) -> list[Completion]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.started_on.append(adapter.version)
        try:
            await self.release.wait()
            if self.error:
                raise self.error
            assert adapter.id in self.loaded
            return [
                Completion([i, 2][: 1 + i % 2], [-0.5, -1.5][: 1 + i % 2], bool(i % 2))
                for i in range(sampling.num_generations)
            ]
        finally:
            self.running -= 1


class Prompts:
    def encode(self, prompt, max_completion_length):
        if prompt == "bad":
            raise LeaseFailure("bad_prompt", "it is bad")
        return [7, 8, 9]

    def decode(self, prompt, completions):
        return [str(ids) for ids in completions]


class Rewards:
    """Holds groups while `release` is an event that is not set."""

    release: asyncio.Event | None = None

    async def score(self, prompt, completions, completion_ids, columns):
        if self.release is not None:
            await self.release.wait()
        if prompt == "unscorable":
            raise LeaseFailure("reward_failed", "it raised")
        return np.array([[float(len(ids)), np.nan] for ids in completion_ids], dtype=np.float32), 0.25


class Setup:
    def __init__(self, folder: Path, max_groups: int) -> None:
        self.engine = SlowEngine()
        self.counters = Counters()
        self.answers: list[Group | Nack] = []
        self.metrics = ProducerMetrics(CollectorRegistry())
        self.registry = registry_of(self.engine, folder, self.counters, metrics=self.metrics)
        self.tasks: list[asyncio.Task[None]] = []
        self.rewards = Rewards()
        self.gate = PolicyGate(self.registry)
        self.clock = BusyClock()
        self.admission = Admission(max_groups, 1, lambda: None)
        self.finish = Finish(("length", "none"), (), self.rewards, self.counters, self.metrics)
        self.generation = self.generation_with("finish", self.engine)

    def generation_with(self, on_swap, engine) -> Generation:
        in_flight = InFlight(engine, self.registry, self.counters, on_swap)
        access = EngineAccess(self.gate, self.registry, self.admission, in_flight, self.clock, 4)
        return self.generation_from(PlainRollouts(access, Prompts()))

    def generation_from(self, source) -> Generation:
        return Generation(source, self.finish, self.clock, self.counters, self.spawn, self.answers.append)

    def spawn(self, work):
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def publish(self, version: int) -> None:
        policy, data = blob(version)
        await self.registry.publish(policy, data, 0.0)

    async def settle(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 5)
        await settle()


@pytest.fixture
def run(tmp_path):
    def runner(body, max_groups=2):
        async def main():
            setup = Setup(tmp_path, max_groups)
            unloading = asyncio.create_task(setup.registry.unload_released())
            await body(setup)
            unloading.cancel()

        asyncio.run(main())

    return runner


def test_a_group_carries_everything_in_the_documented_layout(run):
    async def body(setup):
        await setup.publish(3)
        setup.engine.release.set()
        setup.generation.start(lease(1))
        await setup.settle()
        (group,) = setup.answers
        assert (group.lease_id, group.policy_version, group.reward_s) == ("lease-1", 3, 0.25)
        assert np.frombuffer(group.prompt_ids, "<i4").tolist() == [7, 8, 9]
        assert np.frombuffer(group.completion_lengths, "<i4").tolist() == [1, 2, 1, 2]
        assert np.frombuffer(group.completion_ids, "<i4").tolist() == [0, 1, 2, 2, 3, 2]
        assert np.frombuffer(group.logprobs, "<f4").tolist() == [-0.5, -0.5, -1.5, -0.5, -0.5, -1.5]
        assert np.frombuffer(group.truncated, "u1").tolist() == [0, 1, 0, 1]
        rewards = np.frombuffer(group.rewards, "<f4").reshape(4, 2)
        np.testing.assert_array_equal(rewards, [[1, np.nan], [2, np.nan], [1, np.nan], [2, np.nan]])
        assert (setup.counters.tokens, setup.counters.groups, setup.counters.failed) == (6, 1, 0)

    run(body)


def test_an_evaluation_is_answered_by_the_version_that_it_names_beside_newer_groups(run):
    async def body(setup):
        await setup.publish(3)
        held_out = msgspec.structs.replace(lease(1), sampling=Sampling(1, 6, 0.0), policy_floor=3, evaluates=blob(3)[0])
        setup.generation.start(held_out)
        await settle()
        await setup.publish(5)
        setup.generation.start(lease(2))
        setup.generation.start(msgspec.structs.replace(held_out, lease_id="lease-3"))
        await settle()
        assert sorted(setup.engine.started_on) == [3, 3, 5]
        setup.engine.release.set()
        await setup.settle()
        assert {answer.lease_id: answer.policy_version for answer in setup.answers} == {
            "lease-1": 3, "lease-2": 5, "lease-3": 3,
        }  # fmt: skip
        assert setup.engine.versions == [3, 5], "what is evaluated stays until another version is"

    run(body)


def test_an_evaluation_whose_weights_changed_in_between_is_handed_back_as_such(run):
    class Merging(SlowEngine):
        async def generate(self, prompt_ids, sampling, adapter, cut):
            return [Completion([5, 2], [-0.5, -0.5], False, [3, 4])]

    async def body(setup):
        setup.generation = setup.generation_with("finish", Merging())
        await setup.publish(3)
        setup.generation.start(
            msgspec.structs.replace(lease(1), sampling=Sampling(1, 6, 0.0), policy_floor=3, evaluates=blob(3)[0])
        )
        await setup.settle()
        assert setup.answers == [Nack("lease-1", "no_policy", "v3 is evaluated, and newer weights came in between")]

    run(body)


class CutEngine(SlowEngine):
    """Samples one token before a swap, and two after it."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event
    ) -> list[Completion]:
        if adapter.version == 3:
            await cut.wait()
            return [Completion([5], [-0.5], False, cut=True) for _ in range(sampling.num_generations)]
        return [Completion([6, 2], [-1.0, -1.5], False)]


def test_a_group_that_was_cut_has_the_version_of_each_token_and_is_as_old_as_its_oldest(run):
    async def body(setup):
        setup.generation = setup.generation_with("continue", CutEngine())
        await setup.publish(3)
        setup.generation.start(lease(1))
        await settle()
        setup.gate.pause(True)  # nothing begins, but what is in the engine goes on
        await setup.publish(5)
        await setup.settle()
        (group,) = setup.answers
        assert group.policy_version == 3
        assert np.frombuffer(group.token_versions, "<i4").tolist() == [3, 5, 5] * 4
        assert np.frombuffer(group.completion_ids, "<i4").tolist() == [5, 6, 2] * 4
        assert np.frombuffer(group.logprobs, "<f4").tolist() == [-0.5, -1.0, -1.5] * 4
        assert (setup.engine.versions, setup.counters.cut, setup.counters.tokens) == ([5], 4, 12)

    run(body)


def test_no_more_groups_than_places_are_in_the_engine_and_late_ones_get_the_newest_policy(run):
    async def body(setup):
        await setup.publish(0)
        for number in range(5):
            setup.generation.start(lease(number))
        await settle()
        assert setup.engine.running == 2
        await setup.publish(1)
        setup.engine.release.set()
        await setup.settle()
        assert setup.engine.most_running == 2
        assert setup.engine.started_on == [0, 0, 1, 1, 1]
        assert sorted(group.policy_version for group in setup.answers) == [0, 0, 1, 1, 1]
        assert setup.engine.versions == [1]

    run(body)


def test_a_lease_waits_for_its_policy_floor(run):
    async def body(setup):
        setup.engine.release.set()
        setup.generation.start(lease(0, policy_floor=2))
        for version in (0, 1):
            await setup.publish(version)
            await settle()
            assert setup.answers == []
        await setup.publish(2)
        await setup.settle()
        assert [group.policy_version for group in setup.answers] == [2]

    run(body)


def test_failures_are_answers(run):
    async def body(setup):
        await setup.publish(0)
        setup.engine.release.set()
        setup.generation.start(lease(0, prompt="bad"))
        setup.generation.start(lease(1, prompt="unscorable"))
        await setup.settle()
        assert setup.answers == [
            Nack("lease-0", "bad_prompt", "it is bad"),
            Nack("lease-1", "reward_failed", "it raised"),
        ]
        assert setup.counters.failed == 2

    run(body)


@pytest.mark.parametrize(
    ("floor", "reason", "said"), [(5, "no_policy", "waiting for policy v5"), (0, "generation_failed", "generating")]
)
def test_a_lease_past_its_deadline_is_answered(run, floor, reason, said):
    async def body(setup):
        await setup.publish(0)
        setup.generation.start(lease(0, policy_floor=floor, timeout_s=0.2))
        await setup.settle()
        (nack,) = setup.answers
        assert (nack.lease_id, nack.reason) == ("lease-0", reason)
        assert f"while {said}" in nack.detail
        assert setup.engine.running == 0

    run(body)


def test_abandoned_leases_are_not_answered_and_free_their_places(run):
    async def body(setup):
        await setup.publish(0)
        for number in range(4):
            setup.generation.start(lease(number))
        await settle()
        setup.generation.abandon("lease-0")
        setup.generation.abandon("no such lease")
        await settle()
        assert setup.engine.running == 2
        setup.generation.abandon_all()
        await setup.settle()
        assert (setup.answers, setup.engine.running) == ([], 0)
        await setup.publish(1)
        assert setup.engine.versions == [1]

    run(body)


def test_a_dead_engine_is_no_answer_but_an_error(run):
    async def body(setup):
        await setup.publish(0)
        setup.engine.error = EngineError("the engine died")
        setup.engine.release.set()
        setup.generation.start(lease(0))
        await setup.settle()
        assert setup.answers == []
        assert isinstance(setup.tasks[0].exception(), EngineError)

    run(body)


def test_busy_time_is_the_union_of_running_requests(run, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("producer.rollouts.engine_access.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def body(setup):
        await setup.publish(0)
        for number in range(2):
            setup.generation.start(lease(number))
            await settle()
            now[0] += 2.0
        assert setup.generation.workload().busy_s == 4.0
        setup.engine.release.set()
        await setup.settle()
        now[0] += 1.0
        assert setup.generation.workload().busy_s == 4.0

    run(body)


def test_leases_are_counted_where_they_are(run):
    async def body(setup):
        def stages():
            work = setup.generation.workload()
            return work.waiting_floors, work.generating, work.scoring

        await setup.publish(1)
        scored = setup.rewards.release = asyncio.Event()
        for number in range(3):
            setup.generation.start(lease(number, policy_floor=1))
        setup.generation.start(lease(3, policy_floor=4))
        assert stages() == ((1, 1, 1, 4), 0, 0)
        await settle()
        assert stages() == ((1, 4), 2, 0)
        setup.engine.release.set()
        await settle()
        assert stages() == ((4,), 0, 3)
        scored.set()
        await settle()
        assert stages() == ((4,), 0, 0)
        setup.generation.hand_back_all()
        assert stages() == ((), 0, 0)
        await setup.settle()
        assert sorted(answer.lease_id for answer in setup.answers) == [f"lease-{number}" for number in range(4)]

    run(body)


def test_what_was_handed_back_and_comes_again_is_not_begun(run):
    async def body(setup):
        await setup.publish(1)
        setup.generation.start(lease(1))
        await settle()
        setup.generation.hand_back_all()
        setup.generation.start(lease(2))
        await settle()
        assert setup.engine.started_on == [1]
        assert setup.answers == [Nack("lease-1", "returned")]

    run(body)


def test_while_paused_nothing_enters_the_engine_and_what_is_in_it_goes_on(run):
    async def body(setup):
        await setup.publish(0)
        setup.generation.start(lease(0))
        await settle()
        setup.gate.pause(True)
        for number in range(1, 4):
            setup.generation.start(lease(number, policy_floor=1))
        setup.engine.release.set()
        await setup.publish(1)
        await settle()
        assert [group.lease_id for group in setup.answers] == ["lease-0"]
        assert setup.generation.workload().waiting_floors == (1, 1, 1)
        await setup.publish(2)
        setup.gate.pause(False)
        await setup.settle()
        assert setup.engine.started_on == [0, 2, 2, 2]
        assert len(setup.answers) == 4

    run(body)


def test_a_version_that_goes_while_paused_is_waited_for_again(run):
    async def body(setup):
        await setup.publish(3)
        setup.engine.release.set()
        setup.gate.pause(True)
        setup.generation.start(lease(0, policy_floor=2))
        await settle()
        setup.registry.start_session(blob(2)[0])
        setup.gate.pause(False)
        await settle()
        assert setup.answers == []
        await setup.publish(2)
        await setup.settle()
        assert [group.policy_version for group in setup.answers] == [2]

    run(body)


def test_another_process_of_the_run_lets_work_go_on_and_gets_back_what_might_wait_for_ever(run):
    async def body(setup):
        await setup.publish(5)
        for number in range(2):
            setup.generation.start(lease(number, policy_floor=5))  # in the engine, on v5
        for number, floor in {2: 5, 3: 4, 4: 3, 5: 6}.items():
            setup.generation.start(lease(number, policy_floor=floor))
        await settle()
        setup.generation.hand_back_above(4)
        setup.registry.start_session(blob(4)[0])
        assert setup.answers == [Nack("lease-2", "returned"), Nack("lease-5", "returned")]
        setup.generation.hand_back_above(4)
        assert len(setup.answers) == 2
        setup.engine.release.set()
        await settle()
        assert [(group.lease_id, group.policy_version) for group in setup.answers[2:]] == [
            ("lease-0", 5),
            ("lease-1", 5),
        ]
        await setup.publish(4)
        await setup.settle()
        assert [(group.lease_id, group.policy_version) for group in setup.answers[4:]] == [
            ("lease-3", 4),
            ("lease-4", 4),
        ]
        assert setup.engine.versions == [4]
        assert (setup.counters.failed, setup.counters.groups) == (0, 4)

    run(body)


@pytest.mark.parametrize("rounds", range(6))
def test_a_lease_handed_back_while_it_enters_the_engine_is_answered_once(run, rounds):
    """However far its task has come when the trainer changes, there is one answer."""

    async def body(setup):
        setup.engine.release.set()
        setup.generation.start(lease(0, policy_floor=1))
        await asyncio.sleep(0)
        await setup.publish(1)
        for _ in range(rounds):
            await asyncio.sleep(0)
        setup.generation.hand_back_above(0)
        setup.registry.start_session(blob(0)[0])
        await setup.settle()
        (answer,) = setup.answers
        assert isinstance(answer, Group) if rounds else answer == Nack("lease-0", "returned")
        await setup.publish(0)
        assert setup.engine.versions == [0]
        assert setup.generation.workload().waiting_floors == ()

    run(body)


def test_a_lease_that_comes_again_is_not_answered_by_its_first_task(run):
    async def body(setup):
        await setup.publish(0)
        setup.generation.start(lease(0))
        await settle()
        setup.generation.abandon("lease-0")
        setup.generation.start(lease(0))
        setup.engine.release.set()
        await setup.settle()
        assert len(setup.answers) == 1

    run(body)


def test_a_lease_that_finds_no_room_in_time_says_so(run):
    async def body(setup):
        await setup.publish(0)
        setup.gate.pause(True)
        setup.generation.start(lease(0, timeout_s=0.2))
        await setup.settle()
        (nack,) = setup.answers
        assert (nack.reason, setup.engine.started_on) == ("generation_failed", [])
        assert "while waiting for room in the engine" in nack.detail

    run(body)


def test_with_agents_the_engine_is_theirs_and_what_nobody_did_goes_back_without_harm(run):
    class Agents:
        async def generate(self, lease, progress):
            progress.enter("with agents", "generation_failed")
            await settle()
            assert generations[0].workload().with_agents == 1
            raise LeaseFailure("returned", "no agent worked on it")

    generations = []

    async def body(setup):
        setup.generation = setup.generation_from(Agents())
        generations.append(setup.generation)
        await setup.publish(0)
        setup.generation.start(lease(1))
        await setup.settle()
        assert setup.answers == [Nack("lease-1", "returned")]
        assert setup.counters.failed == 0
        assert setup.engine.started_on == []

    run(body)
