"""The limit of groups in the engine, and the door that keeps it."""

import asyncio
import random
from collections import Counter

import pytest

from producer.engine_contract import EngineLoad
from producer.rollouts import admission as admission_room
from producer.rollouts.admission import ROOM, Admission, AdmissionControl
from tests.unit.producer.loop import asynchronous, settle, until


def load(usage: float = 0.5, waiting: int = 0, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(usage, 8, waiting, preemptions)


def test_more_preemptions_than_are_tolerated_lower_the_limit_by_a_quarter_of_what_is_inside():
    control = AdmissionControl(40, 8)
    assert not control.look(inside=16, load=load(preemptions=128)), "one for each of 16 x 8 completions"
    assert control.limit == 40
    assert control.look(inside=16, load=load(preemptions=129))
    assert control.limit == 12
    assert not control.look(inside=16, load=load(preemptions=129)), "the same preemptions are not counted twice"
    assert control.limit == 12


def test_every_group_that_leaves_pays_for_as_many_as_its_completions():
    control = AdmissionControl(4, 8)
    for left in range(1, 100):
        control.note_left(4, load(usage=1.0, preemptions=8 * left))
    assert control.limit == 4
    for left in range(1, 14):
        assert control.limit == 4
        control.note_left(4, load(usage=1.0, preemptions=792 + 10 * left))
    assert control.limit == 3, "2 more than tolerated each time: the 13th finds 12 x 2 + 10, and 32 are tolerated"


def test_a_decrease_is_not_repeated_before_the_groups_that_were_inside_have_left():
    control = AdmissionControl(4, 1)
    control.look(4, load(preemptions=5))
    for left in range(1, 4):
        control.note_left(4, load(preemptions=5 + 6 * left))
        assert control.limit == 3
    control.note_left(4, load(preemptions=29))
    assert control.limit == 3, "the fourth was inside, too"
    control.look(3, load(preemptions=33))
    assert control.limit == 2, "0.75 x 3 = 2.25"


def test_it_rises_by_about_one_in_a_round_of_groups_while_it_is_what_keeps_them_out():
    control = AdmissionControl(20, 1)
    control.look(16, load(preemptions=17))
    for _ in range(13):
        control.note_left(12, load(preemptions=17))
    assert control.limit == 13, "12 + 13 x about 1/12.5"
    for _ in range(1000):
        control.note_left(5, load(preemptions=17))
        control.note_left(13, load(usage=ROOM, preemptions=17))
    assert control.limit == 13, "neither with places left nor with a cache that is nearly full"
    for _ in range(1000):
        control.note_left(20, load(preemptions=17))
    assert control.limit == 20


def test_it_stays_between_one_and_the_ceiling():
    control = AdmissionControl(3, 1)
    for step in range(1, 9):
        control.note_left(1, load(preemptions=100 * step))
        assert control.limit == 1
    for _ in range(9):
        control.note_left(3, load(preemptions=800))
    assert control.limit == 3


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
    await admission._enter()
    await asyncio.wait_for(admission._enter(), 5)


@pytest.mark.parametrize(("preemptions", "inside"), [(0, 4), (4, 3)])
@asynchronous
async def test_the_door_asks_the_engine_before_it_lets_in(preemptions: int, inside: int):
    told = load(preemptions=100)  # what was before does not count
    admission = Admission(4, 1, lambda: told)
    for _ in range(3):
        await admission._enter()
    told = load(preemptions=100 + preemptions)
    entering = asyncio.create_task(admission._enter())
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
        async with places.place() as place, place.use():
            entered.append(name)
            await end.wait()

    async with places.place() as place:
        async with place.use():
            tasks = [asyncio.create_task(group(str(number), ends[number])) for number in range(3)]
            await asyncio.sleep(0.01)
            assert entered == [], "what is used is kept, however long"
        await until(lambda: entered == ["0"])

        async def again(name: str) -> None:
            async with place.use():
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
    assert places._inside == 0


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
                    async with place.use():
                        uses += 1
                        using[kind] += uses == 1
                        assert using["training"] <= places._inside <= ceiling
                        assert using["evaluation"] <= places._background <= 2 * ceiling
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
    assert (places._inside, places._background, places._line._grants, places._line_behind._grants) == (0, 0, {}, {})
