"""The probe's tokens come from the dataset and are the same in every process; measuring disturbs nothing."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from consumer.link.probe import NUM_ROWS, ROW_LENGTH, Measurement, PolicyProbe, probe_rows
from protocol.errors import ConfigError, DatasetError

ROWS = np.arange(3, 43, dtype=np.int32).reshape(2, 20)


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(character) for character in text]}


class Prompts(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        prompt = super().__getitem__(index)
        if prompt is None:
            raise DatasetError(f"row {index} has no usable prompt")
        return prompt, {}


@pytest.mark.parametrize(
    ("prompts", "seed", "expected"),
    [
        (["ab" * 40, "c"], 0, "ab" * 4),
        (["ab" * 40, "c"], 1, "c" + "ab" * 3 + "a"),
        (["abc"], 5, "abc" * 2 + "ab"),
        ([None, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]], 0, "hi\nho" + "hi\n"),
    ],
)
def test_tokens_are_those_of_the_first_prompts(prompts: list[Any], seed: int, expected: str) -> None:
    rows = probe_rows(Prompts(prompts), tokenizer, seed, longest=4)
    assert (rows.dtype, rows.shape) == (np.int32, (NUM_ROWS, 4))
    assert "".join(map(chr, rows.ravel())) == expected
    assert probe_rows(Prompts(prompts), tokenizer, seed).shape == (NUM_ROWS, ROW_LENGTH)


class Characters:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return tokenizer(text)

    def __len__(self) -> int:
        return 300

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Placed(Prompts):
    def place(self, prompt_id: int) -> str:
        return f"line {prompt_id + 1}"


def test_a_prompt_with_a_token_that_the_model_does_not_have_is_refused() -> None:
    prompts = Placed(["ab", "ac"])
    assert probe_rows(prompts, Characters(), 0, longest=4, vocab_size=ord("d")).shape == (NUM_ROWS, 4)
    said = r"^line 2 has token 99 \('c'\): the tokenizer knows 300 tokens, and the model has embeddings of 99\..*resize_token"
    with pytest.raises(ConfigError, match=said):
        probe_rows(prompts, Characters(), 0, longest=4, vocab_size=ord("c"))


def with_adapter(folder: Path, dtype: torch.dtype, size: float) -> PeftModel:
    """The model with a dropout of half of the adapter's inputs, and matrices B of this size."""
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, size)
    return model


def logprobs(model: Any) -> np.ndarray:
    """What a pass over all rows at once says, in float64."""
    rows = torch.from_numpy(ROWS).long()
    with torch.no_grad():
        found = model.eval()(input_ids=rows).logits[:, :-1].double().log_softmax(-1).gather(2, rows[:, 1:, None])
    return found.flatten().numpy()


def measure(model: PeftModel, *, merged: bool = False) -> dict[str, np.ndarray]:
    measured = PolicyProbe(ROWS, 1, model, contextlib.nullcontext, merged=merged).measure(7)
    assert measured is not None
    probe = measured.probe()
    assert (probe.token_ids, probe.row_length) == (ROWS.astype("<i4").tobytes(), 20)
    parts = ("base", "exact_base", "policy", "exact")
    return {part: np.frombuffer(getattr(probe, part), "<f4").astype(float) for part in parts}


def close(some: np.ndarray, others: np.ndarray) -> bool:
    return bool(np.abs(some - others).max() < 1e-4)


@pytest.mark.parametrize("trains", [False, True])
def test_base_and_policy_are_measured_without_dropout(one_layer_model: Path, trains: bool) -> None:
    model = with_adapter(one_layer_model, torch.float32, 0.1).train(trains)
    found = measure(model)
    assert model.training == trains
    assert close(found["policy"], logprobs(model))
    assert not close(found["policy"], found["base"])
    assert close(found["base"], logprobs(AutoModelForCausalLM.from_pretrained(one_layer_model, dtype=torch.float32)))
    assert found["exact"].size == found["exact_base"].size == 0, "it is float32 already"


def test_a_model_in_16_bits_is_measured_in_float32_too(one_layer_model: Path) -> None:
    model = with_adapter(one_layer_model, torch.bfloat16, 0.1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measure(model)
    assert close(found["policy"], logprobs(model)), "in the model's own format"
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {tensor.dtype for name, tensor in model.state_dict().items() if "lora_" not in name} == {torch.bfloat16}
    exact = logprobs(model.float())
    assert close(found["exact"], exact)
    assert not close(found["policy"], exact)


@pytest.mark.long
def test_merged_weights_are_rounded_as_the_engine_rounds_them(one_layer_model: Path) -> None:
    model = with_adapter(one_layer_model, torch.bfloat16, 1e-3)
    found = measure(model, merged=True)
    assert close(found["exact"], measure(model)["exact"])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = state[f"{name}.base_layer.weight"].float() + module.get_delta_weight("default").float()
            module.base_layer.weight.data = weight.to(torch.bfloat16)
    with model.disable_adapter():
        assert close(found["policy"], logprobs(model))


def test_a_model_whose_code_reads_weights_of_other_modules_is_measured_in_its_format_alone(
    one_layer_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_adapter(one_layer_model, torch.bfloat16, 0.1)
    inner = model.get_base_model()
    forward = inner.forward

    def reads(*arguments: Any, **named: Any) -> Any:
        assert inner.lm_head.weight.dtype == torch.bfloat16
        output = forward(*arguments, **named)
        output.logits = output.logits + (output.logits[..., :8] @ inner.lm_head.weight[:8, :8])[..., :1]
        return output

    inner.forward = reads
    found = measure(model)
    assert close(found["policy"], logprobs(model))
    assert found["exact"].size == found["exact_base"].size == 0
    assert "in the model's own format alone" in caplog.text


@pytest.mark.parametrize(("every", "versions"), [(0, []), (1, [6, 7, 8, 9, 10]), (2, [6, 7, 8, 10]), (3, [6, 7, 8, 9])])
def test_it_is_measured_at_the_first_versions_and_every_so_many(
    one_layer_model: Path, every: int, versions: list[int]
) -> None:
    probe = PolicyProbe(ROWS, every, with_adapter(one_layer_model, torch.float32, 0.1), contextlib.nullcontext)
    measured = {version: probe.measure(version) for version in range(6, 11)}
    assert [version for version, one in measured.items() if one is not None and one.logprobs is not None] == versions
    assert all((one is None) == (every == 0) for one in measured.values()), "tokens and base are known from the start"
    known = [one.probe() for one in measured.values() if isinstance(one, Measurement)]
    assert all(one.base == known[0].base for one in known)
