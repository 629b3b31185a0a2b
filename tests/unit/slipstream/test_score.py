"""`slipstream score`: log-probs of rows under kept policies, against those of transformers and PEFT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ConfigError, DatasetError
from slipstream.score import run
from tests.integration.models import char_tokenizer, reference_logprobs
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.trl_reference import slipstream_trainer

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "completion": "2"},
    {"prompt_ids": [4, 5, 6, 7, 8], "completion_ids": [9, 10, 11, 1]},
    {"prompt": "12+1=", "completion": "13"},
    {"prompt_ids": [4, 5, 6], "completion_ids": [9]},
]
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.5}


def token_ids(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    if "prompt_ids" in row:
        return row["prompt_ids"], row["completion_ids"]
    tokenizer = char_tokenizer()
    return tokenizer(row["prompt"])["input_ids"], tokenizer(row["completion"], add_special_tokens=False)["input_ids"]


def scored(folder: Path, config: Any, which: str, rows: list[dict[str, Any]] = ROWS) -> list[dict[str, Any]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(config, [], which=which, rows_file=folder / "rows.jsonl", to=folder / "scored.jsonl")
    return [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]


def assert_as_transformers(found: list[dict[str, Any]], model: Path, adapter: Path | None, temperature: float) -> None:
    for row, one in zip(ROWS, found, strict=True):
        prompt, completion = token_ids(row)
        expected = reference_logprobs(model, adapter, prompt, completion, temperature)
        torch.testing.assert_close(torch.tensor(one["logprobs"]), expected, atol=2e-5, rtol=0)
        assert one["token_ids"] == completion
        assert one["num_tokens"] == len(completion)
        assert one["sum"] == pytest.approx(float(expected.sum()), abs=1e-4)
        assert one["mean"] == pytest.approx(float(expected.mean()), abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("max_tokens", ["auto", 8])
def test_adapters_and_their_base(tmp_path: Path, one_layer_model: Path, max_tokens: Any) -> None:
    """A checkpoint, the last one, a folder and the base, in one pass and in several."""
    sections = {"sampling": {"temperature": 0.7}, "pipeline": {"trainer_tokens_per_micro_batch": max_tokens}}
    config = run_config(tmp_path, one_layer_model, lora=LORA, **sections)
    trainer = slipstream_trainer(config, one_layer_model)
    adapter = Path(config.run_dir) / "checkpoints" / "checkpoint-3"
    trainer.model.save_pretrained(adapter)
    for name in ("trainer_state.json", "pipeline.json"):
        (adapter / name).write_text("{}")
    assert_as_transformers(scored(tmp_path, config, "base"), one_layer_model, None, 0.7)
    for which in ("3", str(adapter)):
        assert_as_transformers(scored(tmp_path, config, which), one_layer_model, adapter, 0.7)


@pytest.mark.long
def test_whole_weights(tmp_path: Path, one_layer_model: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    for file in one_layer_model.iterdir():
        (policy / file.name).write_bytes(file.read_bytes())
    weights = load_file(policy / "model.safetensors")
    save_file({name: 1.1 * each for name, each in weights.items()}, policy / "model.safetensors", {"format": "pt"})
    config = run_config(tmp_path, one_layer_model, "bfloat16", lora=None, trainer={"bf16": False})
    found = scored(tmp_path, config, str(policy))
    assert_as_transformers(found, policy, None, config.sampling.temperature)
    assert found != scored(tmp_path, config, "base")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1="}, "KeyError: 'completion'"),
        ({"prompt": "1+1=", "completion": ""}, "at least one token each"),
        ({"prompt_ids": [], "completion_ids": [3]}, "at least one token each"),
        ({"prompt_ids": [3], "completion_ids": [3.5]}, "whole numbers"),
        ({"prompt": "1+1=", "completion": [{"role": "assistant", "content": "2"}]}, "neither text nor"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path: Path, tiny_model: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(DatasetError, match=r"rows.jsonl, line 2: ") as caught:
        scored(tmp_path, run_config(tmp_path, tiny_model), "base", [ROWS[0], row])
    assert said in str(caught.value)
    assert not (tmp_path / "scored.jsonl").exists()


def test_a_policy_that_is_not_there_and_a_token_that_is_none(tmp_path: Path, one_layer_model: Path) -> None:
    config = run_config(tmp_path, one_layer_model)
    with pytest.raises(ConfigError, match=r"there are no weights in .*checkpoint-7; .* none"):
        scored(tmp_path, config, "7")
    with pytest.raises(DatasetError, match=r"row 1 has a token that the model's \d+ embeddings lack"):
        scored(tmp_path, config, "base", [{"prompt_ids": [3], "completion_ids": [10_000]}])
