"""Patches of a real vLLM engine's own weights: it computes as an engine that has loaded the patched checkpoint, bit for bit."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from producer.engine_contract import AdapterRefusedError, Completion
from producer.policies.loader import DownloadedPolicy
from producer.policies.registry import AdapterRegistry
from protocol.config.operation import TOLERANCES
from protocol.errors import ConfigError
from protocol.wire import weight_patch
from protocol.wire.adapter_blob import Anchor
from protocol.wire.messages import PolicyInfo, Sampling
from tests.integration.engines import LiveEngine, live_engine, on_engine, run_config
from tests.integration.models import build_model, reference_logprobs
from tests.policies import registry_of
from tests.weight_patches import patch_between

pytestmark = pytest.mark.integration

PROMPT = [5, 6, 7, 8, 9]
PROBE = [*PROMPT, *range(10, 44)]
FULL = {"dtype": "bfloat16", "lora": None}
ON_GPU = {"max_model_len": 256, "max_num_seqs": 64, "gpu_memory_utilization": 0.3}  # two engines at once
GRAPHS = {"engine": ON_GPU} if torch.cuda.is_available() else {}
"""On a GPU weights are patched under CUDA graphs."""


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def live(request, tmp_path_factory):
    """Head and embeddings of qwen2 are one tensor, of llama two."""
    folder = tmp_path_factory.mktemp("full")
    with live_engine(build_model(request.param, folder / "model"), folder, **FULL, **GRAPHS) as engine:
        for version in (1, 2):
            engine.policy(version)
        yield engine


@pytest.fixture
def registry(live: LiveEngine, tmp_path):
    made = registry_of(live.engine.weights, tmp_path, tolerance=TOLERANCES["bfloat16"], unpack=weight_patch.unpack)
    with live.unloading(made):
        yield made


async def generate(live: LiveEngine, registry: AdapterRegistry, length: int, n: int = 4) -> list[Completion]:
    with registry.pin() as adapter:
        return await live.engine.generate(PROMPT, Sampling(n, length, 1.0), adapter)


async def logprobs(live: LiveEngine, registry: AdapterRegistry) -> list[float]:
    with registry.pin() as current:
        return (await live.engine.weights.verify(current, [PROBE]))[0].logprobs


def test_a_patched_engine_computes_as_one_that_has_loaded_the_patched_checkpoint(live, registry, tmp_path):
    async def body():
        found: dict[int, list[float]] = {}
        for version in (1, 2, 1, 2, 1):
            assert await registry.publish(live.downloaded(version))
            numbers = await logprobs(live, registry)
            assert found.setdefault(version, numbers) == numbers, "the way back leads to other bits"
        assert await registry.publish(of_anchor(live, 2, 1))
        assert await logprobs(live, registry) == found[2]
        return found

    found = live.run(body())
    with live_engine(live.peft_folder(2), tmp_path, **FULL, **GRAPHS) as fresh:
        expected = fresh.run(fresh.engine.weights.verify(None, [PROBE]))[0].logprobs
    assert found[2] == expected
    assert found[1] != expected


def of_anchor(live: LiveEngine, version: int, anchor: int) -> DownloadedPolicy:
    """Return a version as a patch of another one, which comes with it."""
    states = (load_file(live.peft_folder(each) / "model.safetensors") for each in (anchor, version))
    info, below = live.policy(anchor)
    data, digest = weight_patch.pack(patch_between(*states)._replace(anchor=info.digest))
    return DownloadedPolicy(PolicyInfo(9, digest, len(data)), data, 0.0, anchor=Anchor(info.digest, below))


@on_engine
async def test_versions_change_in_mid_sequence_and_each_token_says_which_it_has(live, registry):
    assert await registry.publish(live.downloaded(1))
    for _ in range(10):
        running = asyncio.create_task(generate(live, registry, 240, n=64))
        await asyncio.sleep(0.05)
        assert await registry.publish(live.downloaded(2))
        completions = await running
        assert all(each.token_versions == sorted(each.token_versions) for each in completions)
        if any(set(each.token_versions) == {1, 2} for each in completions):
            break
        assert await registry.publish(live.downloaded(1))
    else:
        pytest.fail("no completion spans a swap")
    assert {version for each in await generate(live, registry, 24) for version in each.token_versions} == {2}


def test_a_refused_patch_leaves_none_of_its_tokens_and_the_former_bits(live, registry):
    async def body():
        assert await registry.publish(live.downloaded(1))
        first = await logprobs(live, registry)
        running = asyncio.create_task(generate(live, registry, 240, n=16))
        await asyncio.sleep(0.05)
        refused = live.adapter(2, 200)
        await live.engine.weights.load(refused)
        assert (await live.engine.weights.verify(refused, [PROBE]))[0].logprobs != first
        await live.engine.weights.discard(refused)
        completions = await running  # other requests in a step may change the last bits on a CPU
        assert await logprobs(live, registry) == first
        return completions

    for completion in live.run(body()):
        assert set(completion.token_versions) == {1}


def test_a_patch_that_does_not_fit_is_refused_and_sampling_goes_on(live, registry, caplog):
    _, blob = live.policy(2)
    patch = weight_patch.parse(blob)
    one = patch.tensors[0]
    shape = weight_patch.WeightPatch("", [changed(one, shape=[*one.shape, 1]), *patch.tensors[1:]], patch.streams)
    total = weight_patch.WeightPatch("", [changed(one, sum=one.sum + 1), *patch.tensors[1:]], patch.streams)
    damaged = live.adapter(2, 300)
    file = damaged.path / weight_patch.FILE
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    async def body():
        assert await registry.publish(live.downloaded(1))
        first = await logprobs(live, registry)
        for version, wrong in ((3, shape), (4, total)):
            data, digest = weight_patch.pack(wrong)
            assert not await registry.publish(DownloadedPolicy(PolicyInfo(version, digest, len(data)), data, 0.0))
        with pytest.raises(AdapterRefusedError, match="CRC-32"):
            await live.engine.weights.load(damaged)
        assert await logprobs(live, registry) == first
        return await generate(live, registry, 24)

    assert {version for each in live.run(body()) for version in each.token_versions} == {1}
    assert f"the checkpoint has no {one.name} of shape" in caplog.text
    assert f"the patch of {one.name} does not give the sum" in caplog.text


def changed(tensor: weight_patch.PatchedTensor, **changes: object) -> weight_patch.PatchedTensor:
    fields = {name: getattr(tensor, name) for name in tensor.__struct_fields__}
    return weight_patch.PatchedTensor(**(fields | changes))


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="takes two GPUs, or none")
@pytest.mark.timeout(300)
def test_each_of_two_workers_patches_its_own_part(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # vLLM wants a NUMA node for each worker otherwise
    with live_engine(build_model("qwen2", tmp_path / "model"), tmp_path, num_workers=2, **FULL, **GRAPHS) as live:
        made = registry_of(live.engine.weights, tmp_path, tolerance=TOLERANCES["bfloat16"], unpack=weight_patch.unpack)

        async def body():
            found: dict[int, list[float]] = {}
            for version in (1, 2, 1):
                assert await made.publish(live.downloaded(version))
                numbers = await logprobs(live, made)
                assert found.setdefault(version, numbers) == numbers
            return found

        with live.unloading(made):
            found = live.run(body())
    for version, other in ((1, 2), (2, 1)):
        differences = [
            torch.tensor(found[version]) - reference_logprobs(live.peft_folder(each), None, PROBE[:1], PROBE[1:], 1.0)
            for each in (version, other)
        ]
        right, wrong = (float(each.abs().mean()) for each in differences)
        assert right < 0.2 < 1.0 < wrong


def test_an_engine_that_compiles_on_a_cpu_is_refused(live, tmp_path):
    from .engines import check_engine_section

    with pytest.raises(ConfigError, match=r"lora: null cannot be used here: .*engine.enforce_eager: true.*adapter"):
        check_engine_section(run_config(live.model, tmp_path, engine={"max_model_len": 256}, **FULL))


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"is_moe": True}, "experts"),
        ({"use_mla": True}, "MLA"),
        ({"quant_config": object()}, "quantized"),
        ({"speculative_config": object()}, "engine.speculative_config"),
        ({"pipeline_parallel_size": 2}, "engine.pipeline_parallel_size"),
    ],
)
def test_a_model_and_an_engine_that_cannot_be_patched_are_refused_by_name(tmp_path, found, named):
    from producer.engine.configuration import _check_exchange

    facts = {"is_moe": False, "use_mla": False, "enforce_eager": True, "pipeline_parallel_size": 1}
    part = SimpleNamespace(**{"quant_config": None, "speculative_config": None, **facts, **found})
    whole = SimpleNamespace(**vars(part), model_config=part, parallel_config=part)
    config = run_config(tmp_path, tmp_path, **FULL)
    with pytest.raises(ConfigError, match=rf"cannot be used here: .*{named}.* train an adapter"):
        _check_exchange(config, whole)
    merged = run_config(tmp_path, tmp_path, swap={"mode": "merged"})
    if named in ("experts", "MLA"):
        _check_exchange(merged, whole)
    else:
        with pytest.raises(ConfigError, match=r"swap\.mode: merged cannot be used here"):
            _check_exchange(merged, whole)
