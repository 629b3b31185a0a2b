"""Other families than the demo's: vLLM serves them, chat templates work, log-probs agree with transformers + PEFT."""

import asyncio

import pytest
import torch
from peft import PeftModel

from consumer.learn.model import load_model
from consumer.learn.rotary import follow_engine
from producer.rollouts.prompts import PromptFormat, load_tokenizer
from protocol.wire.messages import Sampling
from tests.integration.engines import live_engine
from tests.integration.models import build_model, reference_logprobs

pytestmark = pytest.mark.integration

MESSAGES = [{"role": "user", "content": "What is the sum of two and three? 你好 🙂"}]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_family(family, tmp_path):
    model = build_model(family, tmp_path / "model")
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    prompts = PromptFormat(tokenizer, 256, {})
    prompt = MESSAGES if family == "llama" else "12+30="
    prompt_ids = prompts.encode(prompt, 16)
    sampling = Sampling(num_generations=8, max_completion_length=16, temperature=0.9)

    with live_engine(model, tmp_path) as live:

        async def body():
            adapter = live.adapter(1, 1)
            await live.engine.weights.load(adapter)
            generating = asyncio.create_task(live.engine.generate(prompt_ids, sampling, adapter))
            await asyncio.sleep(0)
            # In steps that also decode, which ended the engine once.
            scores = (await live.engine.weights.verify(adapter, [prompt_ids]))[0].logprobs
            return scores, await generating

        scores, completions = live.run(body())
        expected = reference_logprobs(model, live.peft_folder(1), prompt_ids[:1], prompt_ids[1:], 1.0)
        torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-3)
        assert len({tuple(completion.token_ids) for completion in completions}) > 1, "sampling is degenerate"
        changes = list[torch.Tensor]()
        for completion in completions:
            expected = reference_logprobs(model, live.peft_folder(1), prompt_ids, completion.token_ids, 0.9)
            without = reference_logprobs(model, None, prompt_ids, completion.token_ids, 0.9)
            assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-3
            changes.append((expected - without).abs())
        assert torch.cat(changes).max() > 0.05, "the adapter changes nothing"  # a completion may have one token

    decoded = prompts.decode(prompt, [completion.token_ids for completion in completions])
    if family == "llama":
        rendered = tokenizer.decode(prompt_ids)
        assert rendered == "<|user|>What is the sum of two and three? 你好 🙂<|end|><|assistant|>"
        for messages in decoded:
            assert not isinstance(messages, str)
            [message] = messages
            assert message["role"] == "assistant"
            assert "<|end|>" not in message["content"]
    else:
        assert all(isinstance(text, str) for text in decoded)


@pytest.mark.parametrize("length", [64, 128])
def test_positions_are_scaled_as_the_engine_scales_them(length, tmp_path):
    """In a row that is shorter than both."""
    model, row = build_model("phi3", tmp_path / "model"), [3 + number % 40 for number in range(40)]
    engine = {"enforce_eager": True, "max_model_len": length, "num_gpu_blocks_override": 64}
    with live_engine(model, tmp_path, engine=engine) as live:

        async def body():
            adapter = live.adapter(1, 1)
            await live.engine.weights.load(adapter)
            return (await live.engine.weights.verify(adapter, [row]))[0].logprobs

        scores = torch.tensor(live.run(body()))
        expected = {}
        for other in (64, 128):
            base = load_model(model, dtype=torch.float32)
            follow_engine(base, live.config.model_copy(update={"engine": {"max_model_len": other}}))
            with torch.no_grad():
                logits = PeftModel.from_pretrained(base, live.peft_folder(1))(input_ids=torch.tensor([row])).logits
            expected[other] = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(row)[1:, None])[:, 0]
    torch.testing.assert_close(scores, expected.pop(length), rtol=0, atol=1e-4)
    [(_, otherwise)] = expected.items()
    assert (scores - otherwise).abs().max() > 0.1
