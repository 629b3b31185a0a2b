"""Tests of vLLM's GPU worker: our worker extensions, vLLM's LoRA kernels, and weights that are installed from pinned memory.

`test_engines.py` runs them in a process with the plugin `tests.gpu.vllm.worker`. Numbers are the interpreter's, which computes
in float16 and float32 as a GPU does, and wrongly in bfloat16.
"""

from pathlib import Path

import pytest
import torch

from producer.engine import lora_metadata
from producer.engine_contract import Completion
from protocol.wire.messages import Sampling
from tests.gpu.stand_in import cuda
from tests.gpu.vllm.worker import ENGINE
from tests.integration.engines import LiveEngine, live_engine
from tests.integration.models import build_model, reference_logprobs
from tests.integration.test_lora_metadata import content_of, runner_of, state_of, step, wrapper_of

TOKENS = [5, 6, 7, 8, 9, 20, 30, 40]
LENGTH = 2
SLOTS = {"max_staleness": 0}  # the kernels look at each, also at empty ones


@pytest.fixture
def mappings(tmp_path, monkeypatch):
    """A file with a letter for each mapping of a step that the engine's process has read."""
    file = tmp_path / "mappings"
    update = lora_metadata.StepMetadata.update

    def noted(self, mapping, *rest, **named):
        with file.open("a") as notes:
            notes.write("b" if isinstance(mapping.index_mapping[0], bytes) else "-")
        update(self, mapping, *rest, **named)

    monkeypatch.setattr(lora_metadata.StepMetadata, "update", noted)
    return file


@pytest.fixture
def adapters(tmp_path, mappings):
    model = build_model("qwen2", tmp_path / "model", num_layers=1)
    with live_engine(model, tmp_path, dtype="float16", engine=ENGINE, pipeline=SLOTS) as engine:
        yield engine


@pytest.fixture
def merged(tmp_path):
    model = build_model("llama", tmp_path / "model", num_layers=1)
    with live_engine(model, tmp_path, engine=ENGINE, swap={"mode": "merged"}) as engine:
        yield engine


@pytest.fixture
def full(tmp_path):
    model = build_model("llama", tmp_path / "model", num_layers=1)
    with live_engine(model, tmp_path, dtype="bfloat16", engine=ENGINE, lora=None) as engine:
        yield engine


def expected(live: LiveEngine, version: int, token_ids: list[int]) -> torch.Tensor:
    folder = live.peft_folder(version) if version else None
    return reference_logprobs(live.model, folder, token_ids[:1], token_ids[1:], 1.0).cpu()


def difference(live: LiveEngine, version: int, scores: list[float]) -> float:
    return float((torch.tensor(scores) - expected(live, version, TOKENS)).abs().max())


def worst_difference(live: LiveEngine, version: int, completion: Completion) -> float:
    all_tokens = expected(live, version, TOKENS + completion.token_ids)[-len(completion.token_ids) :]
    return float((torch.tensor(completion.logprobs) - all_tokens).abs().max())


def check_worker(live: LiveEngine) -> None:
    config = live.engine._core.llm.vllm_config
    assert config.use_v2_model_runner
    assert config.parallel_config.worker_cls.endswith("gpu_worker.Worker")
    assert config.scheduler_config.async_scheduling


def test_adapters_are_computed_by_the_lora_kernels_of_gpus(adapters: LiveEngine, mappings: Path) -> None:
    live = adapters
    check_worker(live)

    async def check() -> None:
        adapter = live.adapter(1, 1)
        await live.engine.weights.load(adapter)
        scores = (await live.engine.weights.verify(adapter, [TOKENS]))[0].logprobs
        assert difference(live, 1, scores) < 0.05
        assert difference(live, 0, scores) > 0.2
        [completion] = await live.engine.generate(TOKENS, Sampling(1, LENGTH, 1.0), adapter)
        assert worst_difference(live, 1, completion) < 0.05
        await live.engine.weights.discard(adapter)
        assert await live.engine._core.call_workers("list_loras") == [[]]

    live.run(check())
    assert "b" in mappings.read_text(), "metadata was ours"


def test_metadata_of_a_step_goes_to_the_gpu_without_a_wait() -> None:
    theirs, ours = (wrapper_of("PunicaWrapperGPU", 3, device="cuda") for _ in range(2))
    gpu = cuda.install()
    for requests in ([(3, 2), (0, 1), (5, 4)], [(0, 3)], [(5, 1), (3, 1)]):
        own, state = state_of(requests), state_of(requests)
        lora_metadata.install(runner_of(ours, state))
        waits = [gpu.num_syncs]
        for made, wrapper in ((own, theirs), (state, ours)):
            step(made, wrapper, requests, [None, 5, 3])
            waits.append(gpu.num_syncs)
        assert waits[0] < waits[1] == waits[2]
        assert content_of(ours) == content_of(theirs)


def test_merged_weights_are_installed_from_pinned_memory_and_taken_back(merged: LiveEngine) -> None:
    live = merged
    check_worker(live)

    async def check() -> None:
        weights = live.engine.weights
        first, second = live.adapter(1, 1), live.adapter(2, 2)
        await weights.load(first)
        before = (await weights.verify(first, [TOKENS]))[0].logprobs
        assert difference(live, 1, before) < 1e-4
        weights.activate(first)
        for completion in await live.engine.generate(TOKENS, Sampling(1, LENGTH, 1.0), first):
            assert completion.token_versions == [1] * len(completion.token_ids)
            assert worst_difference(live, 1, completion) < 1e-4
        await weights.load(second)
        assert difference(live, 2, (await weights.verify(second, [TOKENS]))[0].logprobs) < 1e-4
        await weights.discard(second)
        assert (await weights.verify(first, [TOKENS]))[0].logprobs == before

    live.run(check())


def test_patches_are_written_into_the_weights_of_the_gpu_and_taken_back(full: LiveEngine) -> None:
    """Weights and sums are compared by the product itself; the interpreter's numbers in bfloat16 say only that they changed."""
    live = full
    check_worker(live)

    async def check() -> None:
        weights = live.engine.weights
        base = (await weights.verify(None, [TOKENS]))[0].logprobs
        first, second = live.adapter(1, 1), live.adapter(2, 2)
        await weights.load(first)
        before = (await weights.verify(first, [TOKENS]))[0].logprobs
        assert before != base
        weights.activate(first)
        for completion in await live.engine.generate(TOKENS, Sampling(1, LENGTH, 1.0), first):
            assert completion.token_versions == [1] * len(completion.token_ids)
        await weights.load(second)
        assert (await weights.verify(second, [TOKENS]))[0].logprobs != before
        await weights.discard(second)
        assert (await weights.verify(first, [TOKENS]))[0].logprobs == before

    live.run(check())
