"""Tests of the engine under Model Runner V2, which GPUs take: short ones of tests/integration, and of versions side by side.

`test_engines.py` runs them in a process with the plugin `tests.gpu.vllm.v2`. Lengths are small, because steps are interpreted,
and decoding is never guided, which the interpreter cannot do.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from producer.engine_contract import Completion
from protocol.config.operation import TOLERANCES
from protocol.wire.messages import Sampling
from tests.integration.engines import NUM_BLOCKS, LiveEngine, live_engine, on_engine
from tests.integration.models import build_model, reference_logprobs
from tests.integration.test_engine import (  # noqa: F401 - pytest finds them here, too
    generate,
    registry,
    test_a_refused_adapter_or_request_leaves_the_engine_alive,
    test_a_swap_that_is_right_is_proved_and_one_that_is_not_leaves_the_old_version_serving,
    test_scores_of_given_tokens_are_those_of_transformers_and_peft_also_a_second_time,
    worst_difference,
)
from tests.integration.test_merged import PROMPT, across_a_swap
from tests.policies import registry_of

ENGINE = {
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": NUM_BLOCKS,
}
LENGTH = 24


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("adapter")
    with live_engine(build_model("qwen2", folder / "model"), folder, engine=ENGINE) as engine:
        yield engine


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("merged")
    model = build_model("llama", folder / "model")
    engine = ENGINE | {"async_scheduling": True}
    with live_engine(model, folder, engine=engine, swap={"mode": "merged"}) as started:
        yield started


def is_v2(live: LiveEngine) -> bool:
    return bool(live.engine._core.llm.vllm_config.use_v2_model_runner)


@on_engine
async def test_groups_of_two_versions_run_beside_each_other_under_v2(live, registry) -> None:  # noqa: F811
    assert is_v2(live)
    groups = []
    for version in (1, 2):
        assert await registry.publish(live.downloaded(version))
        groups.append(asyncio.create_task(generate(live, registry, Sampling(2, LENGTH, 1.0))))
        await asyncio.sleep(0)
    for version, group in zip((1, 2), groups, strict=True):
        completions = await group
        assert {each for completion in completions for each in completion.token_versions} == {version}
        assert worst_difference(live, completions, version, 1.0) < 1e-3
        assert worst_difference(live, completions, 3 - version, 1.0) > 0.1


def test_merged_tokens_say_whose_they_are_when_weights_change_in_mid_sequence_under_v2(
    merged: LiveEngine, tmp_path: Path
) -> None:
    """With asynchronous scheduling: what is computed is a step ahead of what is known."""
    mine = registry_of(merged.engine.weights, tmp_path, tolerance=TOLERANCES["float32"])

    async def group(length: int) -> list[Completion]:
        with mine.pin() as adapter:
            return await merged.engine.generate(PROMPT, Sampling(2, length, 1.0), adapter)

    async def check() -> None:
        assert await mine.publish(merged.downloaded(1))
        cut: list[Completion] = []
        while not cut:
            running = asyncio.create_task(group(3 * LENGTH))
            await asyncio.sleep(0.5)
            assert await mine.publish(merged.downloaded(2))
            cut = [each for each in await running if set(each.token_versions) == {1, 2}]
            if not cut:
                assert await mine.publish(merged.downloaded(1))
        for completion in cut:
            expected = across_a_swap(merged, (1, 2), completion)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        for completion in await group(LENGTH):
            assert set(completion.token_versions) == {2}
            expected = reference_logprobs(merged.model, merged.peft_folder(2), PROMPT, completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)

    assert is_v2(merged)
    for version in (1, 2):
        merged.policy(version)  # built beforehand: that takes longer than a group
    with merged.unloading(mine):
        merged.run(check())
