"""Groups and leases meet: in order, once, and never below a floor."""

import asyncio
from typing import Any

import pytest

from producer.engine_contract import Completion
from producer.groups import Episode, LeaseFailure, Rollouts
from protocol.wire.messages import Group
from slipstream_extras.endpoint.atropos.atropos import GroupQueue, QueueFullError
from tests.unit.producer.loop import asynchronous


def group(version: int, name: str = "") -> Any:
    return Group(name, version, b"", b"", b"", b"", b"", b"", 0.0, 0.0)


async def waiting(queue: GroupQueue, *floors: int) -> list["asyncio.Task[Any]"]:
    tasks = [asyncio.create_task(queue.take(floor)) for floor in floors]
    await asyncio.sleep(0)
    return tasks


@asynchronous
async def test_leases_are_served_in_order_and_above_their_floors():
    queue = GroupQueue(1)
    low, other, high = await waiting(queue, 3, 4, 5)
    assert (queue.num_leases, queue.floor) == (3, 3)
    queue.offer(group(2))
    queue.offer(group(4, "a"))
    queue.offer(group(4, "b"))
    assert ((await low).lease_id, (await other).lease_id) == ("a", "b")
    queue.offer(group(4))
    queue.offer(group(6, "c"))
    assert (await high).lease_id == "c"
    assert (queue.leased, queue.stale, queue.num_leases, queue.floor) == (3, 2, 0, 0)


@asynchronous
async def test_groups_wait_while_no_lease_does_and_not_too_many():
    queue = GroupQueue(2)
    queue.offer(group(3, "a"))
    queue.offer(group(4, "b"))
    with pytest.raises(QueueFullError):
        queue.offer(group(5))
    assert await queue.take(4) == group(4, "b")
    (task,) = await waiting(queue, 4)  # "a" is too old for it, and for all that come
    assert (queue.num_groups, queue.stale, queue.num_leases) == (0, 1, 1)
    queue.offer(group(4, "c"))
    assert (await task).lease_id == "c"
    queue.offer(group(4))
    queue.drop_older(5)
    assert (queue.num_groups, queue.stale) == (0, 2)


async def cancel(*tasks: "asyncio.Task[Group]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynchronous
async def test_a_lease_that_is_taken_back_gives_its_group_to_the_next():
    queue = GroupQueue(1)
    first, second = await waiting(queue, 1, 1)
    queue.offer(group(1, "a"))
    await cancel(first)  # it has it, and has not seen it
    assert (await second).lease_id == "a"
    await cancel(*await waiting(queue, 1))
    assert queue.num_leases == 0
    (last,) = await waiting(queue, 1)
    queue.offer(group(1, "b"))
    await cancel(last)
    assert (queue.num_groups, queue.leased) == (1, 1)


@asynchronous
async def test_another_trainer_process_takes_everything_back():
    queue = GroupQueue(1)
    (task,) = await waiting(queue, 7)
    queue.forget()
    with pytest.raises(LeaseFailure) as failure:
        await task
    assert failure.value.reason == "returned"
    queue.offer(group(1))
    queue.forget()
    given, waits = await waiting(queue, 1, 1)
    queue.offer(group(1))
    given.cancel()
    queue.forget()  # before it notices
    await cancel(given, waits)
    assert (queue.void, queue.leased, queue.num_groups, queue.num_leases) == (2, 0, 0, 0)


@asynchronous
async def test_groups_of_the_same_tokens_are_told_apart():
    def rollouts(version: int) -> Rollouts:
        episode = Episode.of([1, 2], Completion([3, 4], [-0.5, -0.5], False, [version, version]))
        return Rollouts([episode], 0.0, ["text"])

    queue = GroupQueue(3)
    queue._groups.extend(map(rollouts, (1, 2)))  # the first is too old for the lease, and not dropped yet
    assert (await queue.take(2)).policy_version == 2
    assert [group.policy_version for group in queue._groups] == [1]
