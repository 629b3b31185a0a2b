"""Versions are pinned, superseded, unloaded and deleted in an order that never starves the engine of a folder."""

import asyncio
import errno
import functools
import itertools
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from producer.engine_contract import Adapter, AdapterFailedError, AdapterRefusedError, Completion, Rows, Scored
from producer.groups import LeaseFailure
from producer.metrics import Counters, ProducerMetrics
from producer.policies.loader import DownloadedPolicy
from producer.policies.probe import ReceivedProbe
from protocol.errors import EngineError, PolicyRefusedError
from protocol.wire.adapter_blob import AdapterBlob, pack
from protocol.wire.messages import PolicyInfo, Sampling
from tests.policies import received_probe, registry_of
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import asynchronous, settle, until


def blob(version: int) -> tuple[PolicyInfo, bytes]:
    data, digest = pack(AdapterBlob(b"{}", b"weights %d" % version))
    return PolicyInfo(version, digest, len(data)), data


class FakeEngine:
    """Keeps the rules of vLLM: a loaded adapter's folder must exist until it is unloaded, names and ids are unique."""

    capabilities: Any = SimpleNamespace(holds_versions=True)

    def __init__(self) -> None:
        self.weights = self
        self.survival: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self.loaded: dict[int, Adapter] = {}
        self.names: list[str] = []
        self.adopted: list[int] = []
        self.refuses = False
        self.failure: Exception | None = None
        self.score_of: dict[int, float | None] = {}  # by version; None: it cannot be scored
        self.loading = 0
        self.unload_waits = 1
        self.slow = asyncio.Event()
        self.slow.set()

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event
    ) -> list[Completion]:
        raise NotImplementedError

    async def verify(self, adapter: Adapter | None, rows: Rows) -> list[Scored]:
        assert adapter is None or adapter.id in self.loaded
        version = -1 if adapter is None else adapter.version
        if (score := self.score_of.get(version, -0.5)) is None:
            raise AdapterRefusedError("too long")
        return [Scored([score] * (len(row) - 1)) for row in rows]

    async def load(self, adapter: Adapter) -> dict[str, float]:
        self.loading += 1
        await self.slow.wait()
        self.loading -= 1
        if self.failure is not None:
            raise self.failure
        if self.refuses:
            raise AdapterRefusedError("rank 512 is too large")
        assert (adapter.path / "adapter_model.safetensors").is_file()
        assert adapter.id not in self.loaded
        assert adapter.name not in self.names
        self.loaded[adapter.id] = adapter
        self.names.append(adapter.name)
        return self.phases

    def activate(self, adapter: Adapter) -> None:
        assert adapter.id in self.loaded
        self.adopted.append(adapter.version)

    async def discard(self, adapter: Adapter) -> None:
        for _ in range(self.unload_waits):
            await asyncio.sleep(0)
        assert adapter.path.is_dir(), "the folder went before the adapter"
        del self.loaded[adapter.id]

    @property
    def versions(self) -> list[int]:
        return [adapter.version for adapter in self.loaded.values()]


def probe(logprob: float) -> ReceivedProbe:
    """The base has a log-prob of -0.5."""
    return received_probe((5, 6), (-0.5,), (logprob,))


class Setup:
    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.folder = folder / "adapters"
        self.counters = Counters()
        self.timeline: list[dict[str, Any]] = []
        self.fetched: list[PolicyInfo] = []
        self.metrics = CollectorRegistry()
        metrics = ProducerMetrics(self.metrics)
        self.taken_again: list[PolicyInfo] = []
        self.registry = registry_of(
            self.engine,
            folder,
            self.counters,
            metrics=metrics,
            record=lambda event, **fields: self.timeline.append({"event": event, **fields}),
            fetch=self.fetched.append,
            take_again=self.taken_again.append,
        )

    async def publish(self, version: int, probe: ReceivedProbe | None = None) -> bool:
        return await self.registry.publish(DownloadedPolicy(*blob(version), 0.0, probe))

    def folders(self) -> int:
        return len(list(self.folder.iterdir()))


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Nothing waits for a thread, so that `settle` is as far as anything gets."""

    async def at_once(function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    return Setup(tmp_path)


def working(test):
    """A test during which the registry publishes what is offered and unloads what is released."""

    @functools.wraps(test)
    async def run(setup, **named):
        tasks = [asyncio.create_task(work) for work in (setup.registry.run(), setup.registry.unload_released())]
        await test(setup, **named)
        for task in tasks:
            task.cancel()

    return asynchronous(run)


@working
async def test_a_superseded_version_goes_at_once_when_nothing_pins_it(setup):
    for version in range(10):
        assert await setup.publish(version)
        assert setup.engine.versions == [version]
        assert setup.folders() == 1
    assert setup.counters.policy_version == 9
    assert setup.engine.adopted == list(range(10))
    for name in ("rl_producer_swap_seconds_count", "rl_producer_adapter_load_seconds_count"):
        assert setup.metrics.get_sample_value(name) == 10
    events = setup.timeline
    assert [event["version"] for event in events] == list(range(10))
    assert all(event["event"] == "swap" and event["ms"] > 0 and event["bytes"] > 0 for event in events)
    setup.engine.phases = {"merge": 0.5, "flip": 0.25}
    assert await setup.publish(10)
    assert (setup.timeline[-1]["merge_ms"], setup.timeline[-1]["flip_ms"]) == (500.0, 250.0)


@working
async def test_an_engine_that_is_not_what_it_was_before_it_slept_ends_the_producer(setup):
    async with setup.registry.unchanged():
        pass  # without a policy there is nothing to compare
    assert await setup.publish(0, probe(-0.5))
    assert await setup.publish(1)  # not every version is probed
    async with setup.registry.unchanged():
        pass
    for now in (-0.51, None):
        with pytest.raises(EngineError, match="start the producer again"):
            async with setup.registry.unchanged():
                setup.engine.score_of[1] = now
        setup.engine.score_of[1] = -0.5
    setup.engine.score_of[1] = None
    async with setup.registry.unchanged():
        pass  # what was never scored proves nothing


@working
async def test_pinned_versions_stay_until_their_last_request_is_done(setup):
    await setup.publish(0)
    with setup.registry.pin() as first:
        with setup.registry.pin() as second:
            await setup.publish(1)
            with setup.registry.pin() as newest:
                await setup.publish(2)
                assert (first.version, second.version, newest.version) == (0, 0, 1)
                assert setup.engine.versions == [0, 1, 2]
                assert [setup.registry.loaded(version) for version in (0, 1, 3)] == [first, newest, None]
            await settle()
            assert setup.engine.versions == [0, 2]
        await settle()
        assert setup.engine.versions == [0, 2]
        assert first.path.is_dir()
    await settle()
    assert setup.engine.versions == [2]
    assert setup.folders() == 1


@working
async def test_what_has_become_too_old_is_told_once_and_other_pins_are_left_alone(setup):
    setup.registry.max_staleness = 1
    told: list[str] = []
    async with AsyncExitStack() as pins:
        await setup.publish(0)
        for name in ("first", "second", "third"):
            pins.enter_context(setup.registry.pin(outdated=partial(told.append, name)))
        await pins.enter_async_context(setup.registry.pin_evaluated(blob(0)[0]))
        pins.enter_context(setup.registry.pin())  # a client's
        with setup.registry.pin(outdated=partial(told.append, "has ended")):
            await setup.publish(1)
        pins.enter_context(setup.registry.pin(outdated=partial(told.append, "of v1")))
        assert told == []
        await setup.publish(2)
        assert told == ["first", "second", "third"]
        setup.registry.start_session(blob(1)[0])  # of a trainer that is back at an older version
        await setup.publish(1)
        await setup.publish(2)
        assert told == ["first", "second", "third"]
        await setup.publish(3)
        assert told == ["first", "second", "third", "of v1"]


@working
async def test_a_version_that_cannot_be_loaded_or_is_not_computed_as_the_trainer_does_never_goes_live(setup, caplog):
    assert await setup.publish(0, probe(-0.5))
    setup.engine.refuses = True
    assert not await setup.publish(1)
    setup.engine.refuses = False
    policy, data = blob(2)
    assert not await setup.registry.publish(DownloadedPolicy(policy, data[:-1], 0.0))
    setup.engine.score_of = {3: -0.502, 4: None}
    assert not await setup.publish(3, probe(-0.5))
    assert (setup.counters.refused_version, setup.counters.policy_version) == (3, 0)
    assert "differ by 0.002 from the trainer's" in setup.counters.refusal
    assert (setup.engine.versions, setup.folders()) == ([0], 1)
    assert await setup.publish(4, probe(-9.0)), "what cannot be scored proves nothing"
    assert (setup.counters.refused_version, setup.counters.refusal) == (-1, "")
    assert setup.engine.versions == [4]
    assert (setup.counters.swaps, setup.counters.failed_swaps) == (2, 3)
    assert "policy v1 is refused, v0 stays: rank 512 is too large" in caplog.text
    assert "policy v2 is refused, v0 stays: checksum mismatch" in caplog.text
    assert "policy v4 cannot be verified: too long" in caplog.text
    events = setup.timeline
    refused = [("swap_refused", version) for version in (1, 2, 3)]
    assert [(event["event"], event["version"]) for event in events] == [("swap", 0), *refused, ("swap", 4)]
    assert [event["probe_difference"] for event in events if "probe_difference" in event] == [0.0]


@working
async def test_versions_that_are_refused_for_good_are_counted_until_one_is_served_or_another_trainer_comes(setup):
    def counted() -> tuple[int, int]:
        return setup.counters.refused_version, setup.counters.num_refused

    await setup.publish(0)
    setup.engine.failure = AdapterRefusedError("rank 512 is too large")
    for version in (1, 2):
        await setup.publish(version)
    assert counted() == (2, 2)
    setup.registry.refuse_for_now(blob(3)[0], "it is 7 bytes large")
    assert counted() == (3, 0), "that one comes again"
    await setup.publish(3)
    await setup.publish(3)
    assert counted() == (3, 3), "one version counts once"
    setup.engine.failure = None
    await setup.publish(4)
    assert counted() == (-1, 0)
    setup.engine.failure = AdapterRefusedError("rank 512 is too large")
    await setup.publish(5)
    assert counted() == (5, 1)
    setup.registry.start_session(blob(4)[0])
    assert counted() == (-1, 0), "the one that is served stays"
    assert setup.counters.policy_version == 4
    setup.engine.slow.clear()
    old = asyncio.create_task(setup.publish(6))
    await settle()
    setup.registry.start_session(blob(4)[0])
    setup.engine.slow.set()
    assert not await old
    assert counted() == (-1, 0), "it was of the trainer before"


@working
async def test_a_producer_that_never_served_a_version_ends_and_one_that_did_goes_on(setup):
    setup.registry.max_refused = 3
    setup.engine.refuses = True
    for version in (7, 8):
        await setup.publish(version)
    with pytest.raises(
        PolicyRefusedError, match=r"3 in a row .* v9 the last: rank 512 is too large\. .* start the producer"
    ):
        await setup.publish(9)
    setup.engine.refuses = False
    await setup.publish(10)
    setup.engine.refuses = True
    for version in range(11, 20):
        assert not await setup.publish(version)
    assert setup.counters.policy_version == 10


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["disk", "workers", "scoring", "memory of the host", "damaged"])
@working
async def test_a_version_that_failed_for_a_reason_that_may_pass_comes_again_after_ever_longer_pauses(
    setup, monkeypatch, what
):
    pauses: list[float] = []

    async def attempt() -> bool:
        policy, data = blob(1)
        data = data[:-1] if what == "damaged" else data
        return await setup.registry.publish(DownloadedPolicy(policy, data, 0.0, probe(-0.5)))

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda s, work, *given: pauses.append(s) or loop.call_soon(work, *given))
    for _ in range(8):
        with monkeypatch.context() as patched:
            if what == "disk":
                patched.setattr(setup.registry.loader, "unpack", full_disk)
            setup.engine.failure = AdapterFailedError("OSError: too many open files") if what == "workers" else None
            if what == "scoring":
                patched.setattr(setup.engine, "verify", unscored)
            if what == "memory of the host":
                setup.registry.refuse_for_now(blob(1)[0], "it is 7 bytes large")
            else:
                assert not await attempt()
        await settle()
        assert (setup.counters.refused_version, setup.engine.versions, setup.counters.policy_version) == (1, [], -1)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert setup.taken_again == [blob(1)[0]] * 8
    what, setup.engine.failure = "", None
    assert await attempt()
    assert (setup.engine.versions, setup.counters.refusal) == ([1], "")
    setup.registry.refuse_for_now(blob(2)[0], "it is damaged")
    assert pauses[-1] == 1.0, "the pauses of one version are not those of the next"


async def unscored(adapter: Adapter, rows: Rows) -> list[Scored]:
    raise AdapterFailedError("vLLM ended the scoring of 2 tokens with finish_reason='error'")


@working
async def test_only_the_newest_offer_is_published(setup):
    setup.engine.slow.clear()
    for version in range(5):
        setup.registry.offer(DownloadedPolicy(*blob(version), 0.0))
        await settle()
    setup.engine.slow.set()
    await asyncio.wait_for(setup.registry.wait_for(4), 5)
    assert [name.split("-")[0] for name in setup.engine.names] == ["v0", "v4"]


@working
async def test_a_new_trainer_voids_versions_that_it_does_not_serve(setup):
    await setup.publish(7)
    setup.registry.start_session(blob(7)[0])
    assert setup.counters.policy_version == 7
    setup.registry.start_session(blob(5)[0])
    assert setup.counters.policy_version == -1
    waiter = asyncio.create_task(setup.registry.wait_for(5))
    await asyncio.sleep(0)
    assert not waiter.done()
    await setup.publish(5)
    await asyncio.wait_for(waiter, 30)
    assert setup.engine.versions == [5]


@working
async def test_a_version_of_a_trainer_that_died_while_it_was_loaded_never_goes_live(setup):
    setup.engine.slow.clear()
    loading = asyncio.create_task(setup.publish(9))
    await until(lambda: setup.engine.loading)
    setup.registry.start_session(blob(3)[0])
    setup.engine.slow.set()
    assert not await loading
    assert setup.counters.policy_version == -1
    assert (setup.engine.versions, setup.engine.adopted) == ([], [])
    assert setup.folders() == 0


@working
async def test_a_request_that_ends_while_a_version_is_proved_does_not_unload_it(setup):
    async def verify(adapter: Adapter | None, rows: Rows) -> list[Scored]:
        if adapter is None:
            return [Scored([-0.5])]
        running.__exit__(None, None, None)
        await settle()
        assert adapter.id in setup.engine.loaded
        return [Scored([-0.5])]

    await setup.publish(0)
    running = setup.registry.pin()
    running.__enter__()
    setup.engine.verify = verify
    assert await setup.publish(1, probe(-0.5))
    assert setup.engine.versions == [1]


@working
async def test_the_share_of_an_update_that_rounding_left_is_told_at_each_swap_with_one_warning_where_it_is_small(
    setup, caplog
):
    for version, share in enumerate((0.9, 0.3, 0.2)):
        setup.engine.survival = {"all": share, "q_proj": 0.12345}
        assert await setup.publish(version)
    assert setup.counters.survival == {"all": 0.2, "q_proj": 0.12345}
    told = [each for each in setup.timeline if each["event"] == "survival"]
    assert told[1] == {"event": "survival", "version": 1, "all": 0.3, "q_proj": 0.1235}
    warnings = [record.getMessage() for record in caplog.records if "swap.mode: adapter" in record.getMessage()]
    assert len(warnings) == 1
    assert all(each in warnings[0] for each in ("30%", "v1", "model.dtype"))
    setup.engine.survival = {}
    assert await setup.publish(3)
    assert setup.counters.survival == {}


# What is evaluated.


async def pinned(setup: Setup, version: int, until: asyncio.Event | None = None) -> int:
    async with setup.registry.pin_evaluated(blob(version)[0]) as adapter:
        assert adapter.id in setup.engine.loaded
        if until is not None:
            await until.wait()
        return adapter.version


@working
async def test_an_evaluated_version_stays_until_another_one_is_evaluated(setup):
    await setup.publish(1)
    assert await pinned(setup, 1) == 1
    for version in (2, 3):
        await setup.publish(version)
    assert setup.engine.versions == [1, 3]
    assert await pinned(setup, 1) == 1
    assert setup.fetched == []
    assert await pinned(setup, 3) == 3
    await settle()
    assert setup.engine.versions == [3]
    assert setup.folders() == 1


@pytest.mark.parametrize("is_evaluated", [False, True])
@working
async def test_a_request_that_is_cancelled_at_any_moment_leaves_no_pin_and_no_folder(setup, is_evaluated):
    """Its client hung up, or its lease was abandoned, perhaps just when it let go of a version that is not current any more."""
    versions = itertools.count()

    async def request() -> None:
        policy = setup.registry._current_policy
        async with setup.registry.pin_evaluated(policy) if is_evaluated else nullcontext():
            with setup.registry.pin():
                setup.registry.start_session(blob(0)[0])  # from now on there is no current version
                await asyncio.sleep(0)

    def check() -> None:
        assert (setup.registry._versions, setup.engine.versions, setup.folders()) == ({}, [], 0)

    await cancel_at_each_wait(request, check, prepare=lambda: setup.publish(next(versions) + 1))


@working
async def test_one_that_is_gone_is_fetched_proved_and_served_beside_the_newest(setup):
    for version in (1, 2):
        await setup.publish(version)
    waiting = [asyncio.create_task(pinned(setup, 1)) for _ in range(3)]
    await settle()
    assert set(setup.fetched) == {blob(1)[0]}
    policy, data = blob(1)
    setup.registry.on_fetched(policy, DownloadedPolicy(policy, data, 0.0, probe(-0.5)))
    assert await asyncio.wait_for(asyncio.gather(*waiting), 5) == [1, 1, 1]
    assert setup.engine.versions == [2, 1]
    assert setup.counters.policy_version == 2


@working
async def test_one_that_is_wanted_again_while_another_is_unloaded_stays(setup):
    """A request whose adapter is gone ends the engine."""
    await setup.publish(1)
    assert await pinned(setup, 1) == 1
    await setup.publish(2)
    await settle()
    setup.registry.start_session(blob(0)[0])  # of a new trainer: both are idle
    evaluating = asyncio.create_task(pinned(setup, 2, asyncio.Event()))
    await settle()
    await setup.publish(5)
    await settle()
    assert setup.engine.versions == [2, 5]
    assert setup.folders() == 2
    evaluating.cancel()


@pytest.mark.parametrize("what", ["missing", "refused", "damaged"])
@working
async def test_one_that_cannot_be_had_fails_its_leases(setup, what):
    await setup.publish(2)
    waiting = asyncio.create_task(pinned(setup, 1))
    await settle()
    policy, data = blob(1)
    answers = {
        "missing": None,
        "refused": DownloadedPolicy(policy, data, 0.0, probe(-0.9)),
        "damaged": DownloadedPolicy(policy, b"damaged", 0.0),
    }
    setup.registry.on_fetched(policy, answers[what])
    with pytest.raises(LeaseFailure, match="could not be had or loaded here"):
        await asyncio.wait_for(waiting, 30)
    assert (setup.engine.versions, setup.folders()) == ([2], 1)
    setup.registry.start_session(blob(2)[0])  # of a trainer that may have it
    waiting = asyncio.create_task(pinned(setup, 1))
    await settle()
    assert not waiting.done()
    assert setup.fetched == [policy] * 2
    waiting.cancel()


@working
async def test_one_that_could_not_be_had_is_asked_for_again_after_a_minute(setup, monkeypatch):
    now = 100.0
    monkeypatch.setattr("producer.policies.registry.time", SimpleNamespace(monotonic=lambda: now))
    await setup.publish(2)
    setup.registry.on_fetched(blob(1)[0], None)
    now += 59
    with pytest.raises(LeaseFailure, match="could not be had or loaded here"):
        await pinned(setup, 1)
    assert setup.fetched == []
    now += 2
    waiting = asyncio.create_task(pinned(setup, 1))
    await settle()
    assert setup.fetched == [blob(1)[0]]
    setup.registry.on_fetched(blob(1)[0], DownloadedPolicy(*blob(1), 0.0))
    assert await asyncio.wait_for(waiting, 5) == 1


def test_of_versions_that_cannot_be_had_only_the_last_ones_are_known(setup):
    for version in range(100):
        setup.registry.on_fetched(blob(version)[0], None)
    assert len(setup.registry._unavailable) == 16


@working
async def test_what_is_evaluated_may_be_said_before_it_is_current(setup):
    setup.registry.hold_s = 60.0
    setup.registry.note_evaluation(blob(1)[0])
    await setup.publish(1)
    setup.registry.offer(DownloadedPolicy(*blob(2), 0.0))
    await settle()
    assert setup.counters.policy_version == 1, "held from its flip on"


@working
async def test_an_engine_of_one_version_keeps_it_for_an_evaluation_and_not_for_ever(setup):
    setup.registry.hold_s = 60.0
    await setup.publish(1)
    for _ in range(2):
        await pinned(setup, 1)
        for version in (2, 3):
            setup.registry.offer(DownloadedPolicy(*blob(version), 0.0))
        await settle()
        assert setup.counters.policy_version == 1, "held, also between two prompts of the evaluation"
    setup.registry.note_evaluation(blob(1)[0])
    await settle()
    assert setup.counters.policy_version == 1
    setup.registry.note_evaluation(None)
    await asyncio.wait_for(setup.registry.wait_for(3), 5)
    with pytest.raises(LeaseFailure, match="the engine has other weights by now"):
        await pinned(setup, 1)
    setup.registry.hold_s = 0.05
    evaluating = asyncio.create_task(pinned(setup, 3, asyncio.Event()))
    await settle()
    setup.registry.offer(DownloadedPolicy(*blob(4), 0.0))
    await asyncio.wait_for(setup.registry.wait_for(4), 5)
    assert not evaluating.done(), "the bound is over"
    setup.registry.hold_s = 60.0  # nothing is held any more
    setup.registry.offer(DownloadedPolicy(*blob(5), 0.0))
    await asyncio.wait_for(setup.registry.wait_for(5), 5)
    evaluating.cancel()
    assert setup.fetched == []


@working
@pytest.mark.parametrize("current", [None, 1])
async def test_an_engine_of_one_version_does_not_pass_over_the_evaluated_one(setup, current):
    setup.registry.hold_s = 60.0
    if current is not None:
        await setup.publish(current)
    setup.registry.note_evaluation(blob(2)[0])
    setup.registry.offer(DownloadedPolicy(*blob(3), 0.0))
    await settle()
    assert setup.fetched == [blob(2)[0]]
    evaluating = asyncio.create_task(pinned(setup, 2))
    setup.registry.offer(DownloadedPolicy(*blob(4), 0.0))
    setup.registry.on_fetched(blob(2)[0], DownloadedPolicy(*blob(2), 0.0))
    assert await asyncio.wait_for(evaluating, 5) == 2
    await settle()
    assert setup.counters.policy_version == 2, "held"
    setup.registry.note_evaluation(None)
    await asyncio.wait_for(setup.registry.wait_for(4), 5)


@working
@pytest.mark.parametrize("reason", ["gone", "refused", "over"])
async def test_an_evaluated_version_that_cannot_be_had_does_not_keep_newer_ones_waiting(setup, reason):
    setup.registry.hold_s = 60.0
    await setup.publish(1)
    setup.registry.note_evaluation(blob(2)[0])
    setup.registry.offer(DownloadedPolicy(*blob(3), 0.0))
    await settle()
    if reason == "refused":
        setup.engine.refuses = True
    if reason == "over":
        setup.registry.note_evaluation(None)
    else:
        setup.registry.on_fetched(blob(2)[0], None if reason == "gone" else DownloadedPolicy(*blob(2), 0.0))
    await until(lambda: reason != "refused" or setup.counters.failed_swaps > 0)
    setup.engine.refuses = False
    setup.registry.offer(DownloadedPolicy(*blob(3), 0.0))
    await asyncio.wait_for(setup.registry.wait_for(3), 5)
    assert setup.counters.policy_version == 3
    assert 2 not in setup.engine.adopted
