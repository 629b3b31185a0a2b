"""Policies merged into the weights of a real vLLM engine: its log-probs are those of PEFT, and each token's version is true."""

import asyncio

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from producer.engine_contract import AdapterRefusedError, Completion
from producer.policies.registry import AdapterRegistry
from protocol.config.operation import TOLERANCES
from protocol.errors import ConfigError
from protocol.wire.messages import Sampling
from slipstream_extras.endpoint.openai import Call, check_request
from tests.integration.engines import LiveEngine, live_engine, on_engine, run_config
from tests.integration.models import build_model, reference_logprobs
from tests.policies import registry_of

pytestmark = pytest.mark.integration

PROMPT = [5, 6, 7, 8, 9]
PROBE = [*PROMPT, *range(10, 44)]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    with live_engine(build_model("qwen2", folder / "model"), folder, swap={"mode": "merged"}) as engine:
        for version in (1, 2):
            engine.policy(version)
        yield engine


@pytest.fixture
def registry(live: LiveEngine, tmp_path):
    made = registry_of(live.engine.weights, tmp_path, tolerance=TOLERANCES["float32"])
    with live.unloading(made):
        yield made


async def generate(live: LiveEngine, registry: AdapterRegistry, length: int, n: int = 4) -> list[Completion]:
    with registry.pin() as adapter:
        return await live.engine.generate(PROMPT, Sampling(n, length, 1.0), adapter)


def across_a_swap(live: LiveEngine, versions: tuple[int, int], completion: Completion) -> torch.Tensor:
    """Log-probs of transformers and PEFT, where the tokens up to the swap have KV of the first version."""
    num_old = completion.token_versions.count(versions[0])
    ids = torch.tensor([PROMPT + completion.token_ids])
    num_cached = len(PROMPT) + num_old - 1  # the last old token is computed by the step that samples the first new one
    cache, logits = DynamicCache(), []
    for version, part in zip(versions, ids[:, :-1].split([num_cached, ids.shape[1] - 1 - num_cached], 1), strict=True):
        base = AutoModelForCausalLM.from_pretrained(live.model, dtype=torch.float32)
        with torch.no_grad():
            model = PeftModel.from_pretrained(base, live.peft_folder(version))
            logits.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits[0])
    logprobs = torch.log_softmax(torch.cat(logits)[len(PROMPT) - 1 :], -1)
    return logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]


@on_engine
async def test_log_probs_are_those_of_peft_and_versions_change_in_mid_sequence_at_the_token_that_says_so(
    live, registry
):
    await registry.publish(live.downloaded(1))
    before = await generate(live, registry, 24)
    cut: list[Completion] = []
    for _ in range(10):
        running = asyncio.create_task(generate(live, registry, 240, n=64))
        await asyncio.sleep(0.05)
        await registry.publish(live.downloaded(2))
        cut = [completion for completion in await running if set(completion.token_versions) == {1, 2}]
        if cut:
            break
        await registry.publish(live.downloaded(1))
    assert cut, "no completion spans a swap"
    for version, completions in ((1, before), (2, await generate(live, registry, 24))):
        for completion in completions:
            assert completion.token_versions == [version] * len(completion.token_ids)
            expected = reference_logprobs(live.model, live.peft_folder(version), PROMPT, completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    for completion in cut[:3]:
        assert completion.token_versions == sorted(completion.token_versions)
        expected = across_a_swap(live, (1, 2), completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("n", [1, 3])
def test_what_clients_get_has_its_version_token_by_token(live, registry, n):
    async def body():
        server = live.engine.openai_server(live.config)
        fields = {"model": "policy", "prompt": PROMPT, "n": n, "max_tokens": 240, "seed": 1, "stream": n > 1}
        request = check_request("completion", fields)
        await registry.publish(live.downloaded(1))
        for _ in range(10):
            with registry.pin() as adapter:
                call = Call(adapter)
                running = asyncio.create_task(everything(server.answer(request, call)))
                await asyncio.sleep(0.03)
                await registry.publish(live.downloaded(2))
                await running
                await call.close()
            await registry.publish(live.downloaded(1))
            if cut := [sampled for sampled in call.sampled if set(sampled.token_versions) == {1, 2}]:
                return call.version, cut[0]
        pytest.fail("no completion spans a swap")

    async def everything(answering):
        answer = await answering
        return answer if isinstance(answer, dict) else [event async for event in answer]

    version, sampled = live.run(body())
    assert version == 1
    completion = Completion(sampled.token_ids, sampled.logprobs, False, sampled.token_versions)
    expected = across_a_swap(live, (1, 2), completion)
    torch.testing.assert_close(torch.tensor(sampled.logprobs), expected, atol=1e-4, rtol=0)


def test_there_and_back_under_load_gives_the_same_bits_and_a_refused_policy_leaves_none_of_its_tokens(live, registry):
    async def body():
        assert await registry.publish(live.downloaded(1))
        with registry.pin() as current:
            first = (await live.engine.weights.verify(current, [PROBE]))[0].logprobs
            running = [asyncio.create_task(generate(live, registry, 240, n=16)) for _ in range(3)]
            for number in range(10):
                for version in (2, 1):
                    adapter = live.adapter(version, 100 + 2 * number + version)
                    await live.engine.weights.load(adapter)
                    live.engine.weights.activate(adapter)
            groups = await asyncio.gather(*running)  # other requests in a step may change the last bits on a CPU
            assert (await live.engine.weights.verify(current, [PROBE]))[0].logprobs == first

            refused = live.adapter(2, 200)
            late = asyncio.create_task(generate(live, registry, 240, n=16))
            await asyncio.sleep(0.05)
            await live.engine.weights.load(refused)
            assert (await live.engine.weights.verify(refused, [PROBE]))[0].logprobs != first
            await live.engine.weights.discard(refused)
            completions = await late
            assert (await live.engine.weights.verify(current, [PROBE]))[0].logprobs == first
            return completions, groups

    late, groups = live.run(body())
    assert len(groups) == 3
    for completion in late:
        assert set(completion.token_versions) == {1}
        expected = reference_logprobs(live.model, live.peft_folder(1), PROMPT, completion.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_a_module_that_the_engine_does_not_have_is_refused_and_so_is_an_engine_that_cannot_merge(live, tmp_path):
    from .engines import check_engine_section

    adapter = live.adapter(1, 300)
    weights = adapter.path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"layers.1.mlp.up_proj", b"layers.7.mlp.up_proj"))
    with pytest.raises(AdapterRefusedError, match=r"layers\.7\.mlp\.up_proj is no linear layer of the engine"):
        live.run(live.engine.weights.load(adapter))
    with pytest.raises(ConfigError, match=r"swap.mode: merged cannot be used here: .*engine.enforce_eager: true"):
        check_engine_section(run_config(live.model, tmp_path, swap={"mode": "merged"}, engine={"max_model_len": 256}))
