"""An engine whose groups have ended in part is filled by others, as the load allows that a scheduler tells at every step."""

import asyncio
import random
from collections import deque
from collections.abc import Callable

import pytest

from producer.engine_contract import EngineLoad, most_groups
from producer.rollouts.admission import Admission, Place
from tests.unit.producer.loop import asynchronous

Lengths = Callable[[random.Random], int]
MEAN = 24
LENGTHS: dict[str, Lengths] = {
    "geometric": lambda rng: next(n for n in range(1, 10_000) if rng.random() < 1 / MEAN),
    "log-normal 0.5": lambda rng: max(1, round(MEAN * rng.lognormvariate(-0.125, 0.5))),
    "log-normal 1": lambda rng: max(1, round(MEAN * rng.lognormvariate(-0.5, 1.0))),
}


class Scheduler:
    """Samples a token of each sequence that runs in a step. The newest is preempted while all have more than `cache` tokens; its
    tokens are computed again when it runs."""

    def __init__(self, places: int, cache: int = 1_000_000) -> None:
        self.places, self.cache, self.preemptions = places, cache, 0
        self.waiting, self.running = deque[Sequence](), list[Sequence]()

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.used / self.cache, len(self.running), len(self.waiting), self.preemptions)

    @property
    def used(self) -> int:
        return sum(sequence.sampled for sequence in self.running)

    async def sample(self, length: int) -> None:
        sequence = Sequence(length)
        self.waiting.append(sequence)
        try:
            await sequence.ended
        finally:
            for place in (self.waiting, self.running):
                if sequence in place:
                    place.remove(sequence)

    def step(self) -> None:
        for sequence in list(self.running):
            sequence.sampled += 1
            if sequence.sampled == sequence.length and not sequence.ended.done():
                self.running.remove(sequence)
                sequence.ended.set_result(None)
        while len(self.running) > 1 and self.used > self.cache:
            self.preemptions += 1
            self.waiting.appendleft(self.running.pop())
        while self.waiting and len(self.running) < self.places and self.used + self.waiting[0].sampled < self.cache:
            self.running.append(self.waiting.popleft())


class Sequence:
    def __init__(self, length: int) -> None:
        self.length, self.sampled, self.ended = length, 0, asyncio.get_running_loop().create_future()


class Scene:
    """Groups without end before an engine of about `max_num_seqs` places."""

    def __init__(self, group_size: int, lengths: Lengths, max_num_seqs: int = 96, cache: int = 1_000_000) -> None:
        ceiling = most_groups(max_num_seqs, group_size)
        self.places, self.group_size, self.rng = ceiling * group_size, group_size, random.Random(0)
        self.lengths, self.completions = lengths, 0
        self.engine = Scheduler(self.places, cache)
        self.admission = Admission(ceiling, group_size, lambda: self.engine.load)
        self.groups = {asyncio.create_task(self.work()) for _ in range(6 * ceiling)}

    async def work(self) -> None:
        while True:
            await self.group()
            self.completions += self.group_size

    async def group(self) -> None:
        async with self.admission.place() as place, place.use(self.group_size), asyncio.TaskGroup() as samples:
            for _ in range(self.group_size):
                samples.create_task(self.engine.sample(self.lengths(self.rng)))

    async def step(self) -> None:
        self.engine.step()
        self.admission.note_load()
        await self.settle()

    async def settle(self, ticks: int = 6) -> None:
        """Let those who entered reach the engine."""
        for _ in range(ticks):
            await asyncio.sleep(0)

    async def share(self, warm: int = 150, steps: int = 150) -> float:
        """Return the share of places that run, after so many steps."""
        running = list[int]()
        for _ in range(warm + steps):
            await self.step()
            running.append(len(self.engine.running))
        return sum(running[warm:]) / steps / self.places

    async def end(self) -> None:
        for group in self.groups:
            group.cancel()
        await asyncio.gather(*self.groups, return_exceptions=True)
        assert (self.admission._inside, self.admission._line.pending) == (set(), [])
        assert not [*self.engine.running, *self.engine.waiting]


@pytest.mark.long
@pytest.mark.parametrize("group_size", [4, 8, 16, 32])
@pytest.mark.parametrize("lengths", LENGTHS)
@asynchronous
async def test_at_least_0_8_of_the_places_run_and_none_waits_in_the_engine(lengths: str, group_size: int) -> None:
    scene = Scene(group_size, LENGTHS[lengths])
    assert await scene.share() >= 0.8
    assert len(scene.engine.running) + len(scene.engine.waiting) <= scene.places
    await scene.end()


@asynchronous
async def test_a_group_enters_in_the_places_of_completions_that_have_ended_and_counts_before_the_engine_has_it() -> (
    None
):
    lengths = iter([1, 2, 9, 9, 1, 9, 9, 9])
    scene = Scene(4, lambda _: next(lengths, 9), max_num_seqs=4)
    seen = []
    for _ in range(5):
        await scene.step()
        seen.append((len(scene.admission._inside), len(scene.engine.running), len(scene.engine.waiting)))
    assert seen == [(2, 0, 8), (2, 8, 0), (2, 6, 0), (2, 5, 0), (2, 5, 0)], "three places are too few for a group"
    scene.engine.running[0].sampled = 8
    await scene.step()
    assert (len(scene.admission._inside), len(scene.engine.running), len(scene.engine.waiting)) == (3, 4, 4)
    await scene.end()


@asynchronous
async def test_a_group_that_has_room_counts_whole_until_it_asks_however_often_the_engine_tells_its_load() -> None:
    scene = Scene(4, lambda _: 1, max_num_seqs=4)
    for group in scene.groups:
        group.cancel()
    places = [scene.admission.place() for _ in range(3)]
    for place in places[:2]:
        await place.__aenter__()
    third = asyncio.create_task(places[2].__aenter__())
    for _ in range(5):
        await scene.step()
    assert not third.done()
    await places[0].__aexit__(None, None, None)
    await third


@asynchronous
async def test_of_a_group_of_several_turns_the_episodes_that_go_on_count() -> None:
    scene = Scene(4, lambda _: 9, max_num_seqs=4)
    for group in scene.groups:
        group.cancel()
    others = [scene.admission.place() for _ in range(2)]
    async with scene.admission.place() as place, place.use(1):
        sampling = [asyncio.create_task(scene.engine.sample(9)) for _ in range(4)]
        entering = asyncio.create_task(others[1].__aenter__())
        async with (await others[0].__aenter__()).use(4):
            seen = []
            for _ in range(4):
                await scene.step()
                seen.append(entering.done())
                place.end_episode()
    assert seen == [False, False, False, True], "four sample, and at first three are between two turns"
    for task in sampling:
        task.cancel()


@pytest.mark.long
@asynchronous
async def test_where_the_cache_is_short_it_is_what_holds_groups_back_and_almost_none_is_preempted() -> None:
    """The cache has 60 % of what all places take at mean length."""
    scene = Scene(8, LENGTHS["geometric"], max_num_seqs=256, cache=round(0.6 * 256 * MEAN))
    assert 0.4 < await scene.share() < 0.6, "0.36 if groups count whole"
    assert scene.engine.preemptions < 0.02 * scene.completions
    await scene.end()


@pytest.mark.parametrize(("preemptions", "inside"), [(0, 3), (1, 2)])
@asynchronous
async def test_after_a_preemption_groups_count_whole(preemptions: int, inside: int) -> None:
    lengths = iter(2 * [1, 1, 9, 9])
    scene = Scene(4, lambda _: next(lengths, 9), max_num_seqs=4)
    for _ in range(2):
        await scene.step()
    scene.engine.preemptions = preemptions
    await scene.step()
    assert (len(scene.engine.running), len(scene.admission._inside)) == (4, inside)
    await scene.end()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@asynchronous
async def test_whatever_is_cancelled_everything_that_entered_leaves_and_the_engine_is_never_asked_for_more(
    seed: int,
) -> None:
    rng = random.Random(seed)
    scene = Scene(4, LENGTHS["geometric"], max_num_seqs=16)
    for _ in range(200):
        for _ in range(rng.randint(0, 3)):
            victim = rng.choice(list(scene.groups))
            asyncio.get_running_loop().call_soon(victim.cancel)
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0)
            scene.groups.remove(victim)
            scene.groups.add(asyncio.create_task(scene.work()))
        await scene.settle(20)
        await scene.step()
        inside: set[Place] = scene.admission._inside
        assert all(0 <= place.num_outside <= 4 for place in inside)
        load = scene.engine.load
        assert load.running + load.waiting + sum(place.num_outside for place in inside) <= 2 * scene.places
        assert load.running + load.waiting <= scene.places
    await scene.end()
