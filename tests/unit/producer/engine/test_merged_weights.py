"""Whose weights the engine has, through trials that end well or badly, and the version of every token."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from producer.engine.weights import InFlightRequest, MergedWeights
from producer.engine_contract import Adapter, AdapterFailedError, AdapterRefusedError, Rows, Scored
from protocol.errors import ConfigError, EngineError
from tests.unit.producer.loop import asynchronous, settle


def adapter(version: int) -> Adapter:
    return Adapter(version, f"v{version}", version, Path(f"/adapters/{version}"))


class Workers:
    """Two of them, that know paths and counts only."""

    def __init__(self) -> None:
        self.paths: list[str | None] = ["base"]
        self.next: str | None = None
        self.counts: dict[str, int] = {}
        self.states: list[tuple[str, str]] = []  # in place of what they are done with
        self.polls = 0
        self.proofs = 0
        self.unproved: set[str] = set()  # paths whose weights are not held as they should be
        self.reasons = ["", ""]  # why they cannot exchange their weights
        self.survivals: list[dict[str, tuple[float, float]]] = [{}, {}]

    async def verify(self, rows: Rows, lora: Any, salt: str, *, is_base: bool) -> list[Scored]:
        assert lora is None
        assert not is_base
        return [Scored([-float(salt.removeprefix("weights-"))] * (len(row) - 1)) for row in rows]

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        await asyncio.sleep(0)
        match method:
            case "weights_start":
                return self.reasons
            case "weights_prepare":
                self.next = args[0]
                self.polls = 0
            case "weights_prove":
                self.proofs += 1
                self.polls = 0
            case "weights_survival":
                return self.survivals
            case "weights_state" if self.polls and self.paths[-1] in self.unproved and self.paths[-1] == self.next:
                return [("done", self.next), ("refused", "o_proj is not the base with the update")]
            case "weights_state":
                self.polls += 1
                done = ("done", self.next or "")
                return (self.states or [done, done]) if self.polls > 1 else [done, ("running", "")]
            case "weights_flip":
                self.paths.append(self.paths[-2] if self.next is None else self.next)
                return [self.counts, {}]
        return [None, None]


class Group:
    """A request of the engine that ends when it is told to."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.aborted = 0
        self.end = asyncio.Event()

    async def __call__(self, request: str, lora: None, salt: str) -> str:
        self.begun.append((request, salt))
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return f"output of {request}"


async def swapped(weights: MergedWeights, version: int) -> MergedWeights:
    policy = adapter(version)
    phases = await weights.load(policy)
    assert list(phases) == ["prepare", "flip", "bits"]
    assert min(phases.values()) >= 0
    weights.activate(policy)
    return weights


async def in_flight(workers: Workers, group: Group) -> tuple[MergedWeights, "asyncio.Task[Any]"]:
    """A group on version 1."""
    weights = await swapped(MergedWeights(workers), 1)
    sampling = asyncio.create_task(weights.sample(group, adapter(1)))
    await settle()
    return weights, sampling


def test_tokens_are_stamped_by_what_each_completion_had_at_each_flip() -> None:
    flight = InFlightRequest(3, [(4, {0: 2, 1: 5}), (6, {0: 2, 1: 9})])
    assert flight.token_versions(0, 4) == [3, 3, 6, 6]
    assert flight.token_versions(1, 10) == [3] * 5 + [4] * 4 + [6]
    assert flight.token_versions(1, 7) == [3] * 5 + [4] * 2, "it ended in between"
    assert flight.token_versions(1, 4) == [3] * 4, "the step after its last token was launched already"
    assert flight.token_versions(2, 2) == [6, 6], "it waited all the time"
    assert InFlightRequest(3).token_versions(0, 2) == [3, 3]


@asynchronous
async def test_a_group_in_flight_goes_on_through_a_swap_and_the_next_has_kv_of_its_own() -> None:
    workers, old, new = Workers(), Group(), Group()
    weights, sampling = await in_flight(workers, old)
    workers.counts = {"0_group-0-1a2b": 2, "1_group-0-1a2b": 1, "0_group-00": 7, "score-3": 1, "a-group-0": 9}
    await swapped(weights, 2)
    old.end.set()
    output, flight = await sampling
    assert output == "output of group-0"
    assert [flight.token_versions(index, 3) for index in (0, 1, 2)] == [[1, 1, 2], [1, 2, 2], [2, 2, 2]]
    new.end.set()
    output, flight = await weights.sample(new, adapter(1))
    assert flight.token_versions(0, 2) == [2, 2]
    assert [salt for _, salt in old.begun + new.begun] == ["weights-1", "weights-2"]
    assert workers.paths == ["base", "/adapters/1", "/adapters/2"]


@asynchronous
async def test_nothing_begins_and_nothing_is_handed_out_pending_verification() -> None:
    old, new = Group(), Group()
    weights, early = await in_flight(Workers(), old)
    second = adapter(2)
    await weights.load(second)
    late = asyncio.create_task(weights.sample(new, adapter(1)))
    old.end.set()
    await settle()
    assert (early.done(), new.begun) == (False, [])
    weights.activate(second)
    new.end.set()
    assert (await early)[0] == "output of group-0"
    assert (await late)[1].version == 2


@pytest.mark.parametrize("ended", [True, False], ids=["ended pending verification", "still running"])
@asynchronous
async def test_refused_weights_are_taken_back_and_what_saw_them_begins_anew(ended: bool) -> None:
    workers, group = Workers(), Group()
    weights, sampling = await in_flight(workers, group)
    second = adapter(2)
    await weights.load(second)
    if ended:
        group.end.set()
        await settle()
    await weights.discard(second)
    await settle()
    assert workers.paths[-3:] == ["/adapters/1", "/adapters/2", "/adapters/1"]
    group.end.set()
    output, flight = await sampling
    assert output == "output of group-1"
    assert flight.token_versions(0, 2) == [1, 1]
    assert group.begun == [("group-0", "weights-1"), ("group-1", "weights-3")]
    assert group.aborted == (0 if ended else 1)
    await swapped(weights, 3)
    assert workers.paths[-1] == "/adapters/3"


@pytest.mark.parametrize(("state", "may_pass"), [("refused", False), ("failed", True)])
@asynchronous
async def test_an_adapter_that_a_worker_cannot_merge_changes_nothing(state: str, may_pass: bool) -> None:
    workers = Workers()
    weights = await swapped(MergedWeights(workers), 1)
    workers.states = [("done", ""), (state, "lm_head is no linear layer")]
    second = adapter(2)
    with pytest.raises(AdapterRefusedError, match="lm_head") as caught:
        await weights.load(second)
    assert isinstance(caught.value, AdapterFailedError) == may_pass
    await weights.discard(second)
    assert workers.paths == ["base", "/adapters/1"]
    assert weights.salt == "weights-1"
    assert await weights.verify(adapter(1), [[5, 6]]) == [Scored([-1.0])]


@asynchronous
async def test_an_engine_that_cannot_take_back_refused_weights_ends_and_keeps_nothing_waiting() -> None:
    workers = Workers()
    weights = await swapped(MergedWeights(workers), 1)
    second = adapter(2)
    await weights.load(second)
    workers.states = [("done", ""), ("failed", "MemoryError: ")]
    with pytest.raises(EngineError, match="cannot take back the former ones: MemoryError"):
        await weights.discard(second)


@asynchronous
async def test_a_group_that_is_cancelled_as_its_weights_are_taken_back_leaves_the_engine() -> None:
    group = Group()
    weights, sampling = await in_flight(Workers(), group)
    second = adapter(2)
    await weights.load(second)
    await weights.discard(second)
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    await settle()
    assert group.aborted == 1


@asynchronous
async def test_weights_that_are_not_held_as_they_were_computed_are_taken_back_and_every_flip_is_proved() -> None:
    workers = Workers()
    workers.unproved = {"/adapters/2"}
    weights = await swapped(MergedWeights(workers), 1)
    with pytest.raises(AdapterRefusedError, match="o_proj is not the base with the update"):
        await weights.load(adapter(2))
    assert workers.paths == ["base", "/adapters/1", "/adapters/2", "/adapters/1"]
    assert workers.proofs == 3
    await swapped(weights, 3)
    assert workers.paths[-1] == "/adapters/3"


@asynchronous
async def test_a_worker_that_cannot_exchange_its_weights_ends_the_start_with_its_reason() -> None:
    workers = Workers()
    await MergedWeights(workers).start()
    workers.reasons = ["", "norm.weight is not loaded as it is"]
    with pytest.raises(ConfigError, match=r"norm\.weight is not loaded as it is; train an adapter"):
        await MergedWeights(workers).start()


@asynchronous
async def test_the_share_of_an_update_is_that_of_all_workers_and_modules() -> None:
    workers = Workers()
    workers.survivals = [{"q_proj": (1.0, 4.0), "o_proj": (3.0, 4.0)}, {"q_proj": (2.0, 2.0), "k_proj": (0.0, 0.0)}]
    weights = await swapped(MergedWeights(workers), 1)
    assert weights.survival == {"all": 0.6, "o_proj": 0.75, "q_proj": 0.5}
    workers.survivals = [{"q_proj": (0.0, 0.0)}, {}]
    assert (await swapped(weights, 2)).survival == {}, "a version without an update loses nothing"
