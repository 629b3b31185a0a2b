"""The text models of vision-language checkpoints: what is adapted, and that it computes what the whole checkpoint does."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForImageTextToText

from consumer.app.setup import Setup
from consumer.learn.forward import Logits
from consumer.learn.model import load_model, outline, within_text_model
from consumer.learn.options import check_model
from consumer.link.snapshots import AdapterSnapshots
from protocol.errors import ConfigError
from protocol.wire.adapter_blob import unpack
from protocol.wire.model_folder import vision_language
from tests.integration.vision_models import build_vision_model
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import loss_and_gradients, slipstream_trainer

FAMILIES = ("gemma3", "gemma4", "qwen3_vl", "qwen3_5", "mistral3")


@pytest.fixture(scope="module")
def vision_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision") / "model", num_layers=1)


def of_whole(folder: Path, adapter: Path, ids: list[int]) -> torch.Tensor:
    """Log-probs of all tokens but the first, of transformers and PEFT."""
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, adapter)(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


@pytest.mark.parametrize(
    ("family", "target_modules"),
    [
        ("gemma3", ["q_proj", "down_proj"]),
        ("qwen2_5_vl", "all-linear"),
        *(pytest.param(family, "all-linear", marks=pytest.mark.long) for family in FAMILIES),
    ],
)
def test_the_text_model_alone_is_adapted_and_computes_what_the_whole_checkpoint_does(
    tmp_path: Path, family: str, target_modules: Any
) -> None:
    """Beside each other: prompts of other lengths, and the token of an image, which is one like any other without an image."""
    checkpoint = build_vision_model(family, tmp_path / "model", num_layers=1 if family != "qwen3_5" else 2)
    config = run_config(tmp_path, checkpoint, lora={"target_modules": target_modules})
    trainer = slipstream_trainer(config, checkpoint)
    adapted = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert adapted
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in adapted)
    assert not any("vis" in name or "projector" in name for name, _ in trainer.model.named_parameters()), (
        "they are dropped"
    )
    assert trainer.row_passes.logits == Logits()

    seen = vision_language(checkpoint)
    assert seen is not None
    image = min(seen.placeholders) if family != "gemma4" else 10  # whose whole model takes another token for it
    completions = [[3, image, 5], [6], [7, 8], [9]]
    groups = [rollout_group(completions, prompt=[3, 4, 5, 6, 7]), rollout_group(completions, prompt=[8, 9])]
    batches = trainer._prepare_inputs(trainer.recipe.tensors(groups))
    _, gradients = loss_and_gradients(trainer, batches)
    assert gradients.any()

    snapshot = AdapterSnapshots(trainer.model).take()
    published = snapshot.published(1)
    unpack(bytes(published.data), published.digest, tmp_path / "adapter")
    [batch] = batches
    found = trainer.forward_pass(batch).logprobs
    rows = [(prompt, completion) for prompt in ([3, 4, 5, 6, 7], [8, 9]) for completion in completions]
    for logprobs, row in zip(found, batch["row"].tolist(), strict=True):
        prompt, completion = rows[row]
        expected = of_whole(checkpoint, tmp_path / "adapter", prompt + completion)[len(prompt) - 1 :]
        torch.testing.assert_close(logprobs[: len(completion)], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "excluded", [["k_proj", "language_model.layers.0.self_attn.v_proj"], r".*\.k_proj|.*\.0\..*v_proj"]
)
def test_what_the_user_leaves_out_stays_out(vision_checkpoint: Path, excluded: Any) -> None:
    lora = within_text_model(LoraConfig(exclude_modules=excluded), outline(vision_checkpoint, trust_remote_code=False))
    layers = "model.language_model.layers"
    for name in (f"{layers}.0.self_attn.k_proj", f"{layers}.0.self_attn.v_proj", "model.visual.blocks.0.mlp.up_proj"):
        assert re.fullmatch(str(lora.exclude_modules), name)
    for name in (f"{layers}.0.self_attn.q_proj", f"{layers}.1.self_attn.v_proj", "lm_head"):
        assert not re.fullmatch(str(lora.exclude_modules), name)


def test_a_model_of_text_alone_is_what_it_was(one_layer_model: Path) -> None:
    lora = LoraConfig(exclude_modules=["k_proj"])
    assert within_text_model(lora, load_model(one_layer_model)) is lora
    assert vision_language(one_layer_model) is None


def test_the_head_is_cast_of_text_models_only(vision_checkpoint: Path) -> None:
    arguments: Any = SimpleNamespace(cast_lm_head_to_fp32=True)
    with pytest.raises(ConfigError, match=r"cast_lm_head_to_fp32: not with the text model .*\(Qwen2_5_VLForCond"):
        check_model(arguments, None, vision_language(vision_checkpoint))


@pytest.mark.long
def test_whole_weights_are_trained_of_text_models_only(
    vision_checkpoint: Path, one_layer_model: Path, tmp_path: Path
) -> None:
    """The model that is written at the end would silently lack the parts that see images."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')

    def load(model: Path, lora: dict[str, Any] | None) -> Setup:
        return Setup.load(run_config(tmp_path, model, "bfloat16", lora=lora), [], lambda: False)

    with pytest.raises(ConfigError, match=r"^lora: null: .*\(Qwen2_5_VLForCond"):
        load(vision_checkpoint, None)
    assert load(vision_checkpoint, {"r": 4}).lora is not None
    assert load(one_layer_model, None).lora is None
