"""The limit of groups in the engine, and the door that keeps it."""

import asyncio
import random
from collections import Counter

import pytest

from producer.engine_contract import EngineLoad
from producer.rollouts import admission as admission_room
from producer.rollouts.admission import Admission
from tests.unit.producer.loop import asynchronous, settle, until


def load(usage: float = 0.5, waiting: int = 0, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(usage, 8, waiting, preemptions)


@asynchronous
async def test_the_door_lets_in_up_to_the_limit_in_order_and_whoever_gives_up_costs_no_place():
    admission, entered, leave = Admission(2, 1, lambda: None), [], asyncio.Event()

    async def group(number: int) -> None:
        async with admission.place():
            entered.append(number)
            await leave.wait()

    tasks = [asyncio.create_task(group(number)) for number in range(5)]
    await settle()
    assert entered == [0, 1]
    tasks[2].cancel()
    tasks[0].cancel()
    await settle()
    assert entered == [0, 1, 3]
    tasks[1].cancel()
    tasks[3].cancel()
    asyncio.get_running_loop().call_soon(tasks[4].cancel)  # the moment it is let in
    await asyncio.gather(*tasks, return_exceptions=True)
    async with admission.place():
        await asyncio.wait_for(admission.place().__aenter__(), 5)


@pytest.mark.parametrize(("preemptions", "inside"), [(0, 4), (4, 3)])
@asynchronous
async def test_the_door_asks_the_engine_before_it_lets_in(preemptions: int, inside: int):
    told = load(preemptions=100)  # what was before does not count
    admission = Admission(4, 1, lambda: told)
    for _ in range(3):
        await admission.place().__aenter__()
    told = load(preemptions=100 + preemptions)
    entering = asyncio.create_task(admission.place().__aenter__())
    await asyncio.sleep(0)
    assert (admission.limit, entering.done()) == (({0: 4, 4: 2}[preemptions]), inside == 4)
    entering.cancel()


@asynchronous
async def test_an_evaluation_takes_the_places_that_training_leaves_and_always_one():
    places, done = Admission(3, 4, lambda: None), asyncio.Event()
    inside: list[str] = []

    async def training() -> None:
        async with places.place():
            inside.append("training")
            await done.wait()

    async def evaluation() -> None:
        async with places.behind(2):
            inside.append("evaluation")
            await done.wait()

    def count(kind: str) -> int:
        return inside.count(kind)

    tasks = [asyncio.create_task(evaluation()) for _ in range(9)]
    await asyncio.sleep(0)
    assert count("evaluation") == 6, "three free places of two each"
    tasks += [asyncio.create_task(training()) for _ in range(5)]
    await asyncio.sleep(0)
    assert count("training") == 3, "as if the evaluation was not there"
    done.set()
    await asyncio.gather(*tasks)
    done.clear()
    inside.clear()
    tasks = [asyncio.create_task(training()) for _ in range(5)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(evaluation()) for _ in range(5)]
    await asyncio.sleep(0)
    assert (count("training"), count("evaluation")) == (3, 2), "one place's worth, however busy it is"
    tasks[-1].cancel()  # while it waits
    tasks[5].cancel()  # inside
    await settle()
    assert count("evaluation") == 3
    done.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (count("training"), count("evaluation")) == (5, 4)


@asynchronous
async def test_an_idle_group_gives_its_place_away_and_enters_again_before_those_that_have_not_begun(monkeypatch):
    monkeypatch.setattr(admission_room, "IDLE_S", 0.0)
    places, ends = Admission(1, 1, lambda: None), [asyncio.Event() for _ in range(4)]
    entered: list[str] = []

    async def group(name: str, end: asyncio.Event) -> None:
        async with places.place() as place, place.use(1):
            entered.append(name)
            await end.wait()

    async with places.place() as place:
        async with place.use(1):
            tasks = [asyncio.create_task(group(str(number), ends[number])) for number in range(3)]
            await asyncio.sleep(0.01)
            assert entered == [], "what is used is kept, however long"
        await until(lambda: entered == ["0"])

        async def again(name: str) -> None:
            async with place.use(1):
                entered.append(name)
                await ends[3].wait()

        first, second = (asyncio.create_task(again(name)) for name in ("first", "second"))
        await settle()
        first.cancel()  # while it waits for the place of both
        await settle()
        ends[0].set()
        await settle()
        assert entered == ["0", "second"]
        ends[3].set()
        await second
        for end in ends:
            end.set()
        await asyncio.gather(*tasks)
    assert entered == ["0", "second", "1", "2"]
    assert not places._inside


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@asynchronous
async def test_whatever_groups_do_the_limit_holds_and_one_environment_that_hangs_stops_no_other(monkeypatch, seed: int):
    monkeypatch.setattr(admission_room, "IDLE_S", 0.0)
    rng, using, preemptions = random.Random(seed), Counter[str](), 0
    limited = seed % 2 == 1  # by preemptions

    def told() -> EngineLoad | None:
        nonlocal preemptions
        preemptions += rng.choice([0, 0, 0, 9])
        return load(preemptions=preemptions) if limited else None

    ceiling = rng.randint(1, 4)
    places = Admission(ceiling, 2, told)

    async def pause() -> None:
        for _ in range(rng.randint(0, 5)):
            await asyncio.sleep(0)

    async def group(kind: str, hangs: bool) -> None:
        async with places.behind(1) if kind == "evaluation" else places.place() as place:
            uses = 0

            async def member() -> None:
                nonlocal uses
                for _ in range(rng.randint(1, 4)):
                    await pause()
                    async with place.use(1):
                        uses += 1
                        using[kind] += uses == 1
                        assert using["training"] <= len(places._inside) <= ceiling
                        assert using["evaluation"] <= len(places._behind) <= 2 * ceiling
                        try:
                            await pause()
                        finally:
                            uses -= 1
                            using[kind] -= uses == 0
                    if hangs:
                        await asyncio.Event().wait()

            async with asyncio.TaskGroup() as members:
                for _ in range(rng.randint(1, 3)):
                    members.create_task(member())

    tasks = {
        asyncio.create_task(group(rng.choice(["training", "evaluation"]), hangs)): hangs for hangs in [True, False] * 12
    }
    for _ in range(rng.randint(0, 40)):
        await asyncio.sleep(0)
        if rng.random() < 0.2:
            rng.choice(list(tasks)).cancel()
    healthy = [task for task, hangs in tasks.items() if not hangs]
    ended = await asyncio.wait_for(asyncio.gather(*healthy, return_exceptions=True), 20.0)
    assert {type(each) for each in ended} <= {type(None), asyncio.CancelledError}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (places._inside, places._behind, places._line._grants, places._line_behind._grants) == (set(), set(), {}, {})
