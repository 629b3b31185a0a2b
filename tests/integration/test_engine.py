"""The real vLLM engine under the real adapter registry: swaps are exact, cost no pause, and leak nothing."""

import asyncio
import json
import os
import re
import shutil
from dataclasses import replace
from typing import Any

import msgspec
import prometheus_client
import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoTokenizer
from vllm.v1.engine.output_processor import RequestState

from producer.engine.adapter_worker import CpuLora
from producer.engine_contract import AdapterRefusedError, Completion, most_groups
from producer.groups import LeaseFailure
from producer.metrics import Counters
from producer.policies.loader import DownloadedPolicy
from producer.policies.probe import ReceivedProbe
from producer.policies.registry import AdapterRegistry
from producer.rollouts.admission import Admission
from producer.rollouts.engine_access import EngineAccess, Progress
from producer.rollouts.in_flight import InFlight
from protocol.config.operation import TOLERANCES
from protocol.errors import ConfigError, EngineError
from protocol.wire.adapter_blob import AdapterBlob, checksum_of, pack
from protocol.wire.messages import PolicyInfo, Sampling
from tests.integration.engines import LiveEngine, live_engine, on_engine, run_config
from tests.integration.models import build_model, random_adapter, reference_logprobs
from tests.policies import received_probe, registry_of
from tests.scripted_trainer import lease
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import until

pytestmark = pytest.mark.integration

PROMPT = [5, 6, 7, 8, 9]
SAMPLING_OF_THE_MODEL = {  # as models come with; nothing of it but the end-of-sequence token may be applied
    "do_sample": True,
    "repetition_penalty": 1.5,
    "top_k": 2,
    "top_p": 0.5,
    "temperature": 0.1,
    "max_new_tokens": 3,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def sampling(length: int = 24, temperature: float = 1.0, n: int = 4) -> Sampling:
    return Sampling(num_generations=n, max_completion_length=length, temperature=temperature)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    model = build_model("qwen2", folder / "model")
    (model / "generation_config.json").write_text(json.dumps(SAMPLING_OF_THE_MODEL))
    with live_engine(model, folder) as engine:
        yield engine


ROW = [*PROMPT, *range(3, 43)] * 4  # more than a block of the prefix cache


def probe(live: LiveEngine, version: int) -> ReceivedProbe:
    """What a trainer sends with `version`."""
    base, policy = (
        reference_logprobs(live.model, folder, ROW[:1], ROW[1:], 1.0) for folder in (None, live.peft_folder(version))
    )
    return received_probe(ROW, base.tolist(), policy.tolist())


def spoiled(live: LiveEngine, version: int, factor: float, settings: dict[str, object]) -> tuple[PolicyInfo, bytes]:
    """The version with its B matrices times `factor`, and other settings in its configuration."""
    folder = live.peft_folder(version)
    tensors = load_file(folder / "adapter_model.safetensors")
    changed = {name: tensor * (factor if "lora_B" in name else 1.0) for name, tensor in tensors.items()}
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    data, digest = pack(AdapterBlob(json.dumps(config).encode(), save(changed)))
    return PolicyInfo(version, digest, len(data)), data


@pytest.fixture
def registry(live: LiveEngine, tmp_path):
    made = registry_of(live.engine.weights, tmp_path, tolerance=TOLERANCES["float32"])
    with live.unloading(made):
        yield made


async def generate(live: LiveEngine, registry: AdapterRegistry, asked: Sampling | None = None) -> list[Completion]:
    """A group on the current version."""
    with registry.pin() as adapter:
        return await live.engine.generate(PROMPT, asked or sampling(), adapter)


def requests_on(live: LiveEngine, adapter: Any) -> list[Any]:
    """The completions on this adapter that are in the engine."""
    states = live.engine._core.llm.output_processor.request_states.values()
    return [state for state in states if state.lora_request and state.lora_request.lora_int_id == adapter.id]


def worst_difference(live: LiveEngine, completions, version: int, temperature: float) -> float:
    def difference(completion: Completion) -> float:
        expected = reference_logprobs(live.model, live.peft_folder(version), PROMPT, completion.token_ids, temperature)
        return (torch.tensor(completion.logprobs) - expected).abs().max().item()

    return max(map(difference, completions))


@pytest.mark.parametrize(
    ("factor", "settings"), [(0.0, {}), (1.0, {"lora_alpha": 17})], ids=["never used", "another scale"]
)
@on_engine
async def test_a_swap_that_is_right_is_proved_and_one_that_is_not_leaves_the_old_version_serving(
    live, registry, factor, settings
):
    assert await registry.publish(live.downloaded(1, probe(live, 1)))
    assert not await registry.publish(DownloadedPolicy(*spoiled(live, 2, factor, settings), 0.0, probe(live, 2)))
    completions = await generate(live, registry)
    assert await registry.publish(live.downloaded(2, probe(live, 2)))
    assert {version for completion in completions for version in completion.token_versions} == {1}
    assert worst_difference(live, completions, 1, 1.0) < 1e-3


def test_a_probe_that_cannot_be_scored_proves_nothing_and_ends_nothing(live, registry):
    for token_ids in ([5, 10**6], [10**6] * 300):
        odd = received_probe(token_ids, [0.0] * (len(token_ids) - 1), [0.0] * (len(token_ids) - 1))
        assert live.run(registry.publish(live.downloaded(1, odd)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@on_engine
async def test_logprobs_after_a_swap_are_those_of_transformers_and_peft(live, registry, temperature):
    for version in (1, 2):
        assert await registry.publish(live.downloaded(version))
    completions = await generate(live, registry, sampling(temperature=temperature))
    assert [completion.token_versions for completion in completions] == [[2] * len(c.token_ids) for c in completions]
    assert len(completions) == 4
    assert worst_difference(live, completions, 2, temperature) < 1e-3
    assert worst_difference(live, completions, 1, temperature) > 0.1, "the swap changed nothing"


@on_engine
async def test_what_ends_a_completion_is_kept_and_guided_decoding_samples_what_matches(live, registry):
    async def sampled(length: int = 24, **asked) -> tuple[list[Completion], list[str]]:
        found = await generate(live, registry, msgspec.structs.replace(sampling(length, n=8), **asked))
        return found, [tokenizer.decode(each.token_ids, skip_special_tokens=True) for each in found]

    assert await registry.publish(live.downloaded(1))
    tokenizer = AutoTokenizer.from_pretrained(live.model)
    ends = tuple(range(20, 46))
    for asked in ({"stop_token_ids": ends}, {"stop": tuple(map(tokenizer.decode, ends[:16]))}):
        completions, _ = await sampled(**asked)
        last = {*ends[: 16 if "stop" in asked else None], 1}
        assert all(not last & set(each.token_ids[:-1]) for each in completions)
        assert [each.truncated for each in completions] == [each.token_ids[-1] not in last for each in completions]
        assert not all(each.truncated for each in completions)
        assert worst_difference(live, completions, 1, 1.0) < 1e-3
    endless, _ = await sampled(200, ignore_eos=True)
    assert {(len(each.token_ids), each.truncated) for each in endless} == {(200, True)}
    guided, texts = await sampled(regex="[0-9]{3}")
    assert all(re.fullmatch("[0-9]{3}", text) for text in texts), texts
    assert not any(each.truncated for each in guided)
    assert worst_difference(live, guided, 1, 1.0) > 0.1, "which is why it is called biased"
    _, texts = await sampled(60, json_schema='{"type": "integer"}')
    assert all(isinstance(json.loads(text), int) for text in texts if len(text) < 60)


@on_engine
async def test_scores_of_given_tokens_are_those_of_transformers_and_peft_also_a_second_time(live, registry):
    tokens = [*PROMPT, *range(10, 44)]
    expected = reference_logprobs(live.model, live.peft_folder(1), tokens[:1], tokens[1:], 1.0)
    await registry.publish(live.downloaded(1))
    with registry.pin() as adapter:
        for _ in range(2):
            scores = torch.tensor((await live.engine.weights.verify(adapter, [tokens]))[0].logprobs)
            torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)


@on_engine
async def test_the_models_own_sampling_defaults_are_not_applied_and_truncation_is_told(live, registry):
    assert live.engine._core.llm.model_config.get_diff_sampling_param()["repetition_penalty"] == 1.5, "vLLM has read it"
    await registry.publish(live.downloaded(1))
    completions: list[Completion] = []
    while not (any(c.truncated for c in completions) and any(not c.truncated for c in completions)):
        assert len(completions) < 64 * 50, "random completions end early or late, never both"
        completions += await generate(live, registry, sampling(40, n=64))
    assert len({completion.token_ids[0] for completion in completions}) > 2
    assert worst_difference(live, completions[:8], 1, 1.0) < 1e-3
    assert all(c.token_ids[-1] == 1 and 1 not in c.token_ids[:-1] for c in completions if not c.truncated)
    assert all(len(c.token_ids) == 40 for c in completions if c.truncated)


@pytest.mark.parametrize(("on_swap", "versions"), [("finish", {30}), ("continue", {30, 31, 32}), ("restart", {31})])
@on_engine
async def test_tokens_of_groups_that_outlive_swaps_have_the_logprobs_of_their_version(
    live, registry, on_swap, versions
):
    counters = Counters()
    in_flight = InFlight(live.engine, registry, counters, on_swap)
    for version in (30, 31, 32):
        live.policy(version)  # built beforehand: that takes longer than a swap
    await registry.publish(live.downloaded(30))
    first = registry.current
    groups = [asyncio.create_task(in_flight.sample(PROMPT, sampling(200, n=8))) for _ in range(3)]

    def is_sampled_on_the_newest() -> bool:
        sampled = requests_on(live, first if on_swap == "finish" else registry.current)
        return bool(sampled) and all(each.detokenizer.num_output_tokens() for each in sampled)

    for version in (31, 32):
        await until(is_sampled_on_the_newest)
        await registry.publish(live.downloaded(version))
        await until(lambda: on_swap != "restart" or counters.restarted == len(groups))
    assert not any(group.done() for group in groups), "the groups were over before the swaps; make them longer"
    groups = await asyncio.gather(*groups)
    assert await live.engine._core.llm.collective_rpc("list_loras") == [[registry.current.id]], "slots are free"
    assert {version for group in groups for c in group for version in c.token_versions} == versions
    for group in groups:
        assert len(group) == 8
        for completion in group:
            of_tokens = torch.tensor(completion.token_versions)
            for version in set(completion.token_versions):
                its_own = of_tokens == version
                expected = reference_logprobs(live.model, live.peft_folder(version), PROMPT, completion.token_ids, 1.0)
                actual = torch.tensor(completion.logprobs)
                torch.testing.assert_close(actual[its_own], expected[its_own], atol=1e-4, rtol=0)
            assert completion.truncated == (completion.token_ids[-1] != 1)
            assert len(completion.token_ids) == 200 or not completion.truncated
    assert not live.engine._core.llm.output_processor.request_states
    assert not live.engine._core.llm.output_processor.parent_requests, "vLLM has forgotten them"


@on_engine
async def test_groups_that_outlive_their_staleness_leave_the_slots_to_the_next_policy(live, registry):
    """vLLM schedules no request for one more adapter while the running ones name as many as it has slots."""
    registry.max_staleness = live.config.pipeline.max_staleness
    access = EngineAccess(
        registry, Admission(64, 4, lambda: None), InFlight(live.engine, registry, Counters(), "finish")
    )
    versions = range(60, 60 + live.config.training_loras + 2)
    probes = {version: probe(live, version) for version in versions}
    asked = msgspec.structs.replace(sampling(240, n=2), ignore_eos=True)

    async def straggle() -> list[Completion]:
        async with access.enter(lease(0), Progress(lease(0))) as sample:
            return await sample(PROMPT, asked)

    groups = []
    for version in versions:
        assert await registry.publish(live.downloaded(version, probes[version]))
        groups.append(asyncio.create_task(straggle()))
        await until(lambda: requests_on(live, registry.current))
    ended: list[Any] = await asyncio.gather(*groups, return_exceptions=True)
    num_usable = registry.max_staleness + 1
    assert [error.reason for error in ended[:-num_usable]] == ["returned"] * (len(versions) - num_usable)
    assert [group[0].token_versions[-1] for group in ended[-num_usable:]] == list(versions)[-num_usable:]
    assert not live.engine._core.llm.output_processor.request_states


@pytest.mark.parametrize(
    ("finish_reason", "raised", "said"),
    [
        ("error", LeaseFailure, "error"),
        ("repetition", LeaseFailure, "repetition"),
        ("abort", EngineError, "abort"),
        ("another lora", EngineError, "sampled on None"),
    ],
)
@on_engine
async def test_what_vllm_could_not_generate_fails_its_lease_and_only_a_broken_engine_ends_the_producer(
    live, registry, monkeypatch, finish_reason, raised, said
):
    def ended(self, *arguments):
        made = make(self, *arguments)
        for sample in made.outputs:
            sample.finish_reason, sample.logprobs = finish_reason, None
        if finish_reason == "another lora":
            made.lora_request = None
        return made

    await registry.publish(live.downloaded(1))
    with monkeypatch.context() as patched:
        make = RequestState._new_request_output
        patched.setattr(RequestState, "_new_request_output", ended)
        with pytest.raises(raised, match=said) as caught:
            await generate(live, registry)
    assert getattr(caught.value, "reason", "generation_failed") == "generation_failed"
    if finish_reason == "another lora":
        with pytest.raises(EngineError, match="vLLM sampled on None"):
            live.engine.check_alive()
        live.engine._core._breach = ""
    live.engine.check_alive()
    assert len(await generate(live, registry)) == 4


@on_engine
async def test_many_swaps_under_load_leave_the_engine_alive_and_one_folder(live, registry, tmp_path):
    versions = []

    async def keep_generating(stop: asyncio.Event):
        while not stop.is_set():
            with registry.pin() as adapter:
                completions = await live.engine.generate(PROMPT, sampling(12), adapter)
                versions.append(adapter.version)
                assert all(len(c.token_ids) == len(c.logprobs) for c in completions)

    for version in range(10, 22):
        live.policy(version)  # built beforehand: that takes longer than a swap
    await registry.publish(live.downloaded(10))
    stop = asyncio.Event()
    workers = [asyncio.create_task(keep_generating(stop)) for _ in range(6)]
    for version in range(11, 22):
        await until(lambda version=version: version - 1 in versions)
        assert await registry.publish(live.downloaded(version))
    await until(lambda: 21 in versions)
    stop.set()
    await asyncio.gather(*workers)
    await until(lambda: len(list((tmp_path / "adapters").iterdir())) == 1)
    families = {family.name: family for family in prometheus_client.REGISTRY.collect()}
    assert families["vllm:lora_requests_info"].samples == [], "no label grows with the run"


@on_engine
async def test_a_refused_adapter_or_request_leaves_the_engine_alive(live, registry, tmp_path):
    await registry.publish(live.downloaded(1))
    broken = live.adapter(2, 9001)
    shutil.rmtree(broken.path)
    with pytest.raises(AdapterRefusedError):
        await live.engine.weights.load(broken)
    random_adapter(live.model, tmp_path / "rank16", rank=16, seed=5)
    too_large = live.adapter(2, 9002)
    shutil.copytree(tmp_path / "rank16", too_large.path, dirs_exist_ok=True)
    too_large = replace(too_large, checksum=checksum_of(too_large.path))
    with pytest.raises(AdapterRefusedError, match="rank"):
        await live.engine.weights.load(too_large)
    with registry.pin() as adapter, pytest.raises(LeaseFailure) as caught:
        await live.engine.generate([5] * 300, sampling(), adapter)
    assert caught.value.reason == "generation_failed"
    assert worst_difference(live, await generate(live, registry), 1, 1.0) < 1e-3


@pytest.mark.parametrize("n", [1, 4])
@on_engine
async def test_a_request_that_is_cancelled_at_any_moment_leaves_nothing_in_the_engine(live, registry, n):
    """vLLM adds the completions of a group one by one, but waits for nothing between the first and the last."""
    from vllm import SamplingParams

    from producer.engine.core import prompt_of

    llm = live.engine._core.llm
    processor = llm.output_processor

    async def add() -> None:
        request = await llm.add_request("cancelled", prompt_of(PROMPT), SamplingParams(n=n, max_tokens=24))
        await llm.abort(request.request_id, internal=True)

    def check() -> None:
        assert (processor.request_states, processor.parent_requests, processor.external_req_ids) == ({}, {}, {})

    await registry.publish(live.downloaded(1))
    assert await cancel_at_each_wait(lambda: generate(live, registry, sampling(24, n=n)), check) > 0
    assert await cancel_at_each_wait(add, check) == 0
    await generate(live, registry, sampling(4))  # load is told by steps, and so by one that is after all these
    await until(lambda: live.engine.current_load().running == live.engine.current_load().waiting == 0)


@on_engine
async def test_completions_of_a_group_share_their_prompt_and_the_engine_tells_its_load(live, registry, monkeypatch):
    def hits() -> float:
        samples = (sample for metric in prometheus_client.REGISTRY.collect() for sample in metric.samples)
        return sum(sample.value for sample in samples if sample.name == "vllm:prefix_cache_hits_total")

    def record(*told, **more) -> None:
        note(*told, **more)
        seen.add(live.engine.current_load())

    before, seen, note = hits(), set[Any](), live.engine._recorder.record
    assert await registry.publish(live.downloaded(1))
    steps = live.engine.current_load().steps
    with registry.pin() as adapter, monkeypatch.context() as patched:
        patched.setattr(live.engine._recorder, "record", record)  # after each step, however late this loop hears of it
        asked = msgspec.structs.replace(sampling(length=40), ignore_eos=True)
        await live.engine.generate([5] * 70, asked, adapter)
    load = max(seen, key=lambda load: load.running)
    assert (load.running, load.waiting, load.preemptions) == (4, 0, 0)
    assert 0 < load.kv_cache_usage < 1
    after = live.engine.current_load().steps
    assert after.sequences - steps.sequences == 4 * 40
    assert after.number - steps.number in (40, 41), "the first computes the prompt, alone or not"
    assert 4 * 40 + 70 <= after.tokens - steps.tokens <= 4 * 40 + 4 * 70
    assert after.with_graph is None, "a CPU has none"
    assert 3 * 64 <= hits() - before <= 3 * 70, "the whole blocks of 32 of the prompt, for three of the four"


# Engines beside the first one, from here on: vLLM then takes the first one's metrics out of the registry.


def test_an_engine_serves_adapters_of_the_modules_that_are_trained_and_refuses_those_of_others(live, tmp_path):
    """Here of one that vLLM fuses with two others, and of one on its own."""
    targets = ["q_proj", "down_proj"]
    lora = {"r": 8, "lora_alpha": 16, "target_modules": targets}
    with live_engine(live.model, tmp_path, lora=lora) as narrow:
        narrow._published[1] = (tmp_path / "peft", *random_adapter(live.model, tmp_path / "peft", targets=targets))
        registry = registry_of(narrow.engine.weights, tmp_path, tolerance=TOLERANCES["float32"])
        completions: list[Completion] = []
        refusals: list[str] = []

        async def body() -> None:
            assert await registry.publish(narrow.downloaded(1, probe(narrow, 1)))
            completions.extend(await generate(narrow, registry))
            assert not await registry.publish(narrow.downloaded(2))
            refusals.append(registry.report.counters.refusal)

        with narrow.unloading(registry):
            narrow.run(body())
        assert worst_difference(narrow, completions, 1, 1.0) < 1e-3
        assert "vLLM serves no adapter of" in refusals[0]
        assert "mlp.down_proj" not in refusals[0]


def test_a_prefix_cache_that_does_not_tell_versions_apart_is_seen_at_the_first_one(live, tmp_path, monkeypatch):
    """In bfloat16 its log-probs were not far enough from others to be refused."""
    monkeypatch.setattr("vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys", lambda request: [])
    with live_engine(live.model, tmp_path, dtype="bfloat16") as stale:
        registry = registry_of(stale.engine.weights, tmp_path, tolerance=TOLERANCES["bfloat16"])
        with stale.unloading(registry):
            assert not stale.run(registry.publish(stale.downloaded(1, probe(stale, 1))))
            assert "found 160 tokens in the engine's prefix cache" in registry.report.counters.refusal


def test_a_request_that_outlives_the_engine_is_cancelled_quietly_and_none_begins(live, tmp_path):
    with live_engine(live.model, tmp_path) as other:
        adapter = other.adapter(1, 1)

        async def body():
            await other.engine.weights.load(adapter)
            asked = asyncio.create_task(other.engine.generate(PROMPT, sampling(200), adapter))
            await asyncio.sleep(0.05)
            other.engine.shutdown()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            for call in (other.engine.generate(PROMPT, sampling(), adapter), other.engine.weights.discard(adapter)):
                with pytest.raises(EngineError, match="the engine has been shut down"):
                    await call
            with pytest.raises(EngineError, match="the engine has been shut down"):
                other.engine.check_alive()

        other.run(body())


def test_a_policy_is_verified_while_the_engine_is_full_of_long_completions(live):
    """On a GPU a probe waited 15 s for 256 completions of equal length."""
    can, asked = live.engine.capabilities, Sampling(4, 200, 1.0, ignore_eos=True)
    adapter = live.adapter(1, 1)

    async def body():
        await live.engine.weights.load(adapter)
        groups = [
            asyncio.create_task(live.engine.generate(PROMPT, asked, adapter))
            for _ in range(most_groups(can.max_num_seqs, live.config.sampling.num_generations))
        ]
        while live.engine.current_load().running < can.max_num_seqs:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.01)
        await live.engine.weights.verify(adapter, [PROMPT])
        assert not any(group.done() for group in groups)
        await asyncio.gather(*groups)
        await live.engine.weights.discard(adapter)

    live.run(body())


def test_the_facts_for_the_handshake_and_what_the_engine_leaves_to_others(live):
    """With as many threads as cores it decoded at a third of its pace beside one busy process; another vLLM could not make
    sockets in its folder once the engine has ended."""
    facts = live.engine.capabilities.facts
    assert (facts.dtype, facts.logprobs_mode) == ("float32", "processed_logprobs")
    assert (facts.max_lora_rank, facts.max_loras, facts.max_model_len) == (8, 3, 256)
    assert facts.reward_names == ["reward"]
    assert live.engine.capabilities.max_num_seqs == 64
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) - 1), "which its process inherited"
    assert "VLLM_RPC_BASE_PATH" not in os.environ


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"max_model_len": 100_000}, "Value error, User-specified max_model_len (100000) is greater"),
        (
            {"gpu_memory_utilization": 3.0},
            "engine: refused by vLLM: 1 validation error for CacheConfig\ngpu_memory_utilization\n  Input should be less",
        ),
        ({"quantization": "no-such-method"}, "Unknown quantization method: no-such-method"),
        ({"load_format": "dummy"}, "engine.load_format"),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 2,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_length": 2.0,
                }
            },
            "rejection_sample_method=synthetic",
        ),
    ],
)
def test_what_vllm_refuses_is_a_configuration_error(live, tmp_path, engine, said):
    from .engines import check_engine_section

    with pytest.raises(ConfigError) as caught:
        check_engine_section(run_config(live.model, tmp_path, engine=engine, swap={"probe_tolerance": 1.0}))
    assert said in str(caught.value)


def test_on_a_cpu_adapters_are_multiplied_as_vllm_does_it_token_by_token() -> None:
    """Against vLLM's own code for CPUs: a prompt beside two tokens of decoding, on three adapters."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    theirs, ours = (PunicaWrapperCPU(16, 4, "cpu") for _ in range(2))
    CpuLora(ours)
    down, up, x = torch.randn(3, 1, 8, 12), torch.randn(3, 1, 6, 8), torch.randn(5, 12)
    for wrapper in (theirs, ours):
        wrapper.update_metadata(LoRAMapping((7, 7, 7, 5, 6), (7, 5, 6), is_prefill=True), [5, 6, 7], 3, 100)
    results = []
    for wrapper in (theirs, ours):
        y = torch.ones(5, 10)
        wrapper.add_lora_linear(y, x, (down,), (up,), 0.25, (6,))
        results.append(y)
    assert (results[0][:, :6] != 1).all()
    torch.testing.assert_close(*results)
    head_down, head_up = torch.randn(3, 1, 8, 12), torch.randn(3, 1, 20, 8)
    results = []
    for wrapper in (theirs, ours):
        logits = torch.ones(3, 20)
        wrapper.add_lora_logits(logits, x[2:], head_down, head_up, 1.0)
        results.append(logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
