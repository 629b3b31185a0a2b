"""Whatever policies arrive while a group is sampled, and wherever it is cut, its tokens are whole and known by their policy."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.engine_contract import Adapter, Completion
from producer.engine_gate import EngineGate
from producer.groups import LeaseFailure
from producer.metrics import Counters
from producer.rollouts.in_flight import BusyClock, InFlight
from protocol.wire.messages import Sampling
from tests.policies import Policies
from tests.unit.producer.loop import asynchronous, settle, until

PROMPT = [-1, -2, -3]
NUM, LONGEST = 3, 6


@dataclass
class Row:
    """One completion in the engine."""

    prompt: list[int]
    longest: int
    adapter: Adapter
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: list[int] = field(default_factory=list)


class Engine:
    """Samples when told to, every time another token, and remembers what it was sampled from and on."""

    capabilities = SimpleNamespace(holds_versions=True)

    def __init__(self, policies: Policies, num_lost: int = 0) -> None:
        self.policies = policies
        self.num_lost = num_lost  # tokens of a request that are sampled and not told when it is cut
        self.rows: list[Row] = []
        self.sampled: list[tuple[list[int], int]] = []  # by token: what came before, and the version
        self.stops: set[int] = set()
        self.refuses = False  # the next request

    async def generate(self, prompt_ids, sampling: Sampling, adapter: Adapter, cut: asyncio.Event):
        assert self.policies.pins[adapter.version] > 0
        assert sampling.max_completion_length > 0
        if self.refuses:
            self.refuses = False
            raise LeaseFailure("generation_failed", "no")
        rows = [Row(prompt_ids, sampling.max_completion_length, adapter) for _ in range(sampling.num_generations)]
        self.rows += rows
        waits = [asyncio.ensure_future(self._all(rows)), asyncio.ensure_future(cut.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return [self._piece(row) for row in rows]
        finally:
            assert self.policies.pins[adapter.version] > 0, "unpinned before its requests ended"
            self.rows = [row for row in self.rows if row not in rows]
            for wait in waits:
                wait.cancel()

    def sample(self, which: int, stop: int) -> None:
        """One token for each row whose bit is set; it is the last one where `stop` has the bit too."""
        for index, row in enumerate(row for row in self.rows if not row.ended.is_set()):
            if which >> index & 1:
                token = len(self.sampled)
                self.sampled.append((row.prompt + row.tokens, row.adapter.version))
                row.tokens.append(token)
                if stop >> index & 1:
                    self.stops.add(token)
                if token in self.stops or len(row.tokens) == row.longest:
                    row.ended.set()

    @staticmethod
    async def _all(rows: list[Row]) -> None:
        for row in rows:
            await row.ended.wait()

    def _piece(self, row: Row) -> Completion:
        ended = row.ended.is_set()
        tokens = row.tokens if ended else row.tokens[: max(0, len(row.tokens) - self.num_lost)]
        truncated = ended and tokens[-1] not in self.stops
        return Completion(
            tokens, [-float(token) for token in tokens], truncated, [row.adapter.version] * len(tokens), not ended
        )


class Group:
    """A group under way."""

    def __init__(self, on_swap: str, num_lost: int = 0, clock=lambda: 0.0, **more: object) -> None:
        self.policies, self.counters = Policies(), Counters()
        self.engine = Engine(self.policies, num_lost)
        self.newest = 0
        self.policies.swap(0)
        self.gate = EngineGate()
        in_flight = InFlight(self.engine, self.policies, self.counters, on_swap, clock, gate=self.gate)  # type: ignore[arg-type]
        sampling = Sampling(num_generations=NUM, max_completion_length=LONGEST, temperature=1.0, **more)  # type: ignore[arg-type]
        self.task = asyncio.ensure_future(in_flight.sample(PROMPT, sampling))

    async def sample(self, which: int = 0b111, stop: int = 0) -> None:
        self.engine.sample(which, stop)
        await settle()

    async def flip(self, *, gone: bool = False) -> None:
        """A newer policy goes live; or the one there is goes."""
        self.newest += not gone
        self.policies.swap(None if gone else self.newest)
        await settle()

    def versions(self) -> list[list[int] | None]:
        return [completion.token_versions for completion in self.task.result()]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from([0b111, 0b111, 0b101, 0b010, 0]),
        st.sampled_from([0, 0, 0, 0b001, 0b110]),
        st.sampled_from(["flip", "flip", "gone", "flip, then gone", "stay", "turn", "turn, in which it flips"]),
    ),
    max_size=8,
)


@pytest.mark.long
@pytest.mark.parametrize(("on_swap", "num_examples"), [("finish", 20), ("continue", 50), ("restart", 25)])
def test_tokens_are_whole_and_stamped_wherever_a_group_is_cut(on_swap, num_examples):
    @settings(max_examples=num_examples)
    @given(ACTIONS, st.integers(0, 1), st.integers(0, 9))
    def holds(actions, num_lost, abandoned):
        asyncio.run(live_through(actions, on_swap, num_lost, abandoned=abandoned == 0))

    holds()


async def live_through(actions, on_swap, num_lost, *, abandoned):
    group = Group(on_swap, num_lost)
    await settle()
    for which, stop, change in actions:
        await group.sample(which, stop)
        if change == "flip, then gone":
            group.newest += 1
            group.policies.swap(group.newest)
            await asyncio.sleep(0)
        if change.startswith("turn"):
            await group.gate.close(0.0)
            assert group.engine.rows == []
            if change != "turn":
                await group.flip()
            group.gate.open()
            await settle()
        elif change != "stay":
            await group.flip(gone=change != "flip")
    if abandoned:
        group.task.cancel()
        await settle()
    for _ in range(2 * LONGEST):
        await group.sample()
    assert group.engine.rows == []
    assert set(group.policies.pins.values()) == {0}
    if not group.task.cancelled():
        check(group, on_swap)


def check(group: Group, on_swap: str) -> None:
    completions = group.task.result()
    assert len(completions) == NUM
    for completion in completions:
        tokens, versions = completion.token_ids, completion.token_versions
        assert len(tokens) == len(completion.logprobs) == len(versions)
        assert 1 <= len(tokens) <= LONGEST
        assert [(PROMPT + tokens[:i], versions[i]) for i in range(len(tokens))] == [
            group.engine.sampled[token] for token in tokens
        ]
        assert completion.logprobs == [-float(token) for token in tokens]
        assert versions == sorted(versions)
        assert not completion.cut
        assert completion.truncated == (tokens[-1] not in group.engine.stops)
        assert len(tokens) == LONGEST or not completion.truncated
    if on_swap != "continue":
        assert len({version for versions in group.versions() for version in versions}) == 1
    assert group.counters.restarted <= 1


@asynchronous
async def test_a_group_is_not_cut_again_before_its_time_in_the_engine_has_doubled():
    group = Group("continue", clock=iter([0.0, 1e6]).__next__)
    await settle()
    for _ in range(3):
        await group.flip()
    assert {row.adapter.version for row in group.engine.rows} == {1}
    assert group.counters.cut == NUM


@asynchronous
async def test_a_cut_that_had_to_wait_goes_over_to_the_newest_policy():
    group = Group("continue", clock=iter([1e5, 1e5 + 0.05, 1e7]).__next__)
    await settle()
    for _ in range(3):
        await group.flip()
    assert group.counters.cut == NUM
    await until(lambda: {row.adapter.version for row in group.engine.rows} == {3})
    assert group.policies.pinned() == {3}


@asynchronous
async def test_a_group_restarts_once_and_then_finishes():
    group = Group("restart")
    await settle()
    await group.sample()
    await group.flip()
    assert [(row.prompt, row.tokens, row.adapter.version) for row in group.engine.rows] == [(PROMPT, [], 1)] * NUM
    await group.flip()
    await group.sample(0b111, stop=0b111)
    assert group.versions() == [[1]] * NUM
    assert (group.counters.restarted, group.counters.dropped_tokens, group.counters.cut) == (1, NUM, 0)


@asynchronous
async def test_a_refused_rest_ends_the_group_and_its_other_requests():
    group = Group("continue")
    await settle()
    await group.sample()
    group.engine.refuses = True
    await group.flip()
    with pytest.raises(LeaseFailure):
        group.task.result()
    assert (group.engine.rows, set(group.policies.pins.values())) == ([], {0})


@pytest.mark.parametrize(
    ("on_swap", "keeps_weights", "kept"), [("finish", True, 0), ("finish", False, None), ("continue", True, None)]
)
@asynchronous
async def test_the_turns_of_a_group_stay_on_one_policy_where_requests_do(on_swap, keeps_weights, kept):
    """Where the engine's own weights are replaced under a request, as with `finish` here, nothing is kept."""
    policies = Policies()
    engine = Engine(policies, 0)
    engine.capabilities = SimpleNamespace(holds_versions=keeps_weights)
    policies.swap(0)
    in_flight = InFlight(engine, policies, Counters(), on_swap, lambda: 0.0)
    sampling = Sampling(num_generations=1, max_completion_length=1, temperature=1.0)
    with in_flight.pin_for_group() as adapter:
        assert (adapter and adapter.version) == kept
        for version in (0, 1):
            turn = asyncio.ensure_future(in_flight.sample(PROMPT, sampling, adapter))
            await settle()
            engine.sample(1, 0)
            ((token_version,),) = [completion.token_versions for completion in await turn]
            assert token_version == (version if kept is None else kept)
            policies.swap(version + 1)


@pytest.mark.parametrize(
    ("on_swap", "more", "within_s", "versions"),
    [
        ("finish", {}, 0.0, [0] * LONGEST),
        ("finish", {"stop": ("x",)}, 0.0, [0] * LONGEST),  # from its beginning
        ("continue", {}, 60.0, [0] + [1] * (LONGEST - 1)),
        ("restart", {}, 60.0, [1] * LONGEST),
        ("restart", {"stop": ("x",)}, 0.0, [1] * LONGEST),
    ],
)
@asynchronous
async def test_a_group_leaves_the_engine_for_the_trainers_turn_and_goes_on_after_it(on_swap, more, within_s, versions):
    group = Group(on_swap, **more)
    await settle()
    await group.sample()
    await group.gate.close(within_s)
    assert group.engine.rows == []
    await group.flip()
    assert group.engine.rows == [], "it waits"
    group.gate.open()
    await until(lambda: len(group.engine.rows) == NUM)
    for _ in range(LONGEST):
        await group.sample()
    assert group.versions() == [versions] * NUM
    dropped = on_swap == "restart" or "stop" in more
    assert (group.counters.restarted, group.counters.cut) == ((1, 0) if dropped else (0, NUM))


@asynchronous
async def test_a_turn_alone_makes_no_group_restart():
    group = Group("restart")
    await settle()
    await group.sample()
    await group.gate.close(60.0)
    group.gate.open()
    await settle()
    await group.sample()
    await group.flip()
    await group.sample(0b111, stop=0b111)
    assert group.versions() == [[1]] * NUM
    assert (group.counters.cut, group.counters.restarted, group.counters.dropped_tokens) == (NUM, 1, 2 * NUM)


@asynchronous
async def test_a_group_that_finishes_has_its_time_before_the_trainers_turn():
    group = Group("finish")
    await settle()
    closing = asyncio.ensure_future(group.gate.close(60.0))
    for _ in range(LONGEST):
        assert not closing.done()
        await group.sample()
    await closing
    assert group.versions() == [[0] * LONGEST] * NUM


def test_busy_time_is_the_union_of_running_requests(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("producer.rollouts.in_flight.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = BusyClock()
    for _ in range(2):
        with clock.running():
            now[0] += 1.0
            with clock.running():
                now[0] += 2.0
            assert clock.busy_s() % 4.0 == 3.0, "it runs"
            now[0] += 1.0
        now[0] += 5.0
    assert clock.busy_s() == 8.0
