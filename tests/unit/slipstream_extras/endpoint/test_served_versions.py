"""Which version answers, and which ones clients keep loaded."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from slipstream_extras.endpoint.openai import RefusedError
from slipstream_extras.endpoint.versions import ServedVersions
from tests.policies import Policies
from tests.unit.producer.loop import asynchronous


class Scene:
    def __init__(self, max_versions: int = 1, is_merged: bool = False) -> None:
        self.now = 0.0
        self.registry = Policies()
        self.versions = ServedVersions(
            self.registry, max_versions, 60.0, is_merged=is_merged, clock=lambda: self.now  # type: ignore[arg-type]
        )  # fmt: skip
        self.registry.swap(1)

    async def ask(self, name: str) -> int:
        async with self.versions.use(name) as adapter:
            return adapter.version

    async def begin(self, name: str) -> tuple[int, AsyncExitStack]:
        stack = AsyncExitStack()
        adapter = await stack.enter_async_context(self.versions.use(name))
        return adapter.version, stack


@asynchronous
async def test_a_version_that_answered_can_be_named_after_the_swap_until_its_time_is_over():
    scene = Scene()
    assert await scene.ask("policy") == 1
    scene.registry.swap(2)
    assert await scene.ask("policy") == 2
    scene.now = 59.0
    assert await scene.ask("policy@v1") == 1
    assert scene.versions.names() == ["policy", "policy@v2", "policy@v1"]
    scene.now = 118.0
    scene.versions.release_unused()
    assert scene.registry.pinned() == {1, 2}
    scene.now = 119.0
    scene.versions.release_unused()
    assert scene.registry.pinned() == {2}
    with pytest.raises(RefusedError, match=r"there is: policy, policy@v2 \(others are not loaded\)") as refused:
        await scene.ask("policy@v1")
    assert (refused.value.status, refused.value.reason) == (404, "unknown_model")


@asynchronous
async def test_a_name_goes_before_versions_that_nobody_named_and_names_are_bounded():
    scene = Scene(max_versions=1)
    assert await scene.ask("policy@v1") == 1
    for version in range(2, 10):
        scene.registry.swap(version)
        assert await scene.ask("policy") == version
        assert scene.registry.pinned() == {1, version}
    _, holding = await scene.begin("policy@v1")
    with pytest.raises(RefusedError, match="already use 1 versions by name") as refused:
        await scene.ask("policy@v9")
    assert refused.value.status == 429
    await holding.aclose()
    scene.now = 1.0
    assert await scene.ask("policy@v9") == 9
    scene.registry.swap(10)
    assert await scene.ask("policy") == 10
    assert scene.registry.pinned() == {9, 10}


@asynchronous
async def test_requests_that_outlive_their_versions_hold_two_of_them_and_drain():
    scene = Scene(max_versions=0)
    begun = []
    for version in range(1, 7):
        scene.registry.swap(version)
        begun.append(await scene.begin("policy"))
    assert [version for version, _ in begun] == [1, 2, 2, 2, 2, 2]
    assert scene.registry.pinned() == {1, 2}
    await begun[0][1].aclose()
    assert await scene.ask("policy") == 6, "1 has drained"
    for _, stack in begun[1:]:
        await stack.aclose()
    scene.registry.swap(7)
    await scene.ask("policy")
    assert scene.registry.pinned() == {7}


@asynchronous
async def test_merged_weights_are_one_version_and_say_so():
    scene = Scene(is_merged=True)
    assert await scene.ask("policy@v1") == 1
    scene.registry.swap(2)
    with pytest.raises(RefusedError, match=r"policy, policy@v2 \(the engine has a single version"):
        await scene.ask("policy@v1")
    assert await scene.ask("policy") == 2
    assert scene.registry.pinned() == {2}


@asynchronous
async def test_another_trainer_process_voids_the_names_of_the_one_before():
    scene = Scene()
    await scene.ask("policy@v1")
    scene.registry.swap(2)
    scene.versions.forget()
    assert scene.registry.pinned() == set()
    with pytest.raises(RefusedError):
        await scene.ask("policy@v1")


@pytest.mark.parametrize("name", ["", "policy@", "policy@v", "policy@v-1", "policy@v1 ", "gpt-4", "policy@v٣", "v1"])
def test_other_names_are_unknown(name):
    with pytest.raises(RefusedError) as refused:
        asyncio.run(Scene().ask(name))
    assert refused.value.status == 404


@asynchronous
async def test_a_request_keeps_its_version_when_the_endpoint_ends_before_it():
    """Without it the engine would die."""
    scene = Scene()
    (_, first), (_, second) = [await scene.begin("policy") for _ in range(2)]
    scene.versions.close()
    assert scene.registry.pinned() == {1}
    _, after = await scene.begin("policy")
    for stack in (first, second):
        assert scene.registry.pinned() == {1}
        await stack.aclose()
    assert scene.registry.pins == {1: 1}
    await after.aclose()
    scene.versions.close()
    assert scene.registry.pins == {1: 0}


def test_what_is_pinned_is_the_version_that_was_asked_for():
    scene = Scene()
    older = scene.registry.current
    scene.registry.swap(2)
    scene.versions._use_of(older)
    assert scene.registry.pinned() == {1}
