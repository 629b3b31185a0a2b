"""Which checkpoints see, and which of these a run can train."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from protocol.wire.model_check import is_of_text_model
from protocol.wire.model_folder import vision_language


def folder_of(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_tokens_of_images_and_videos_are_known(tmp_path: Path) -> None:
    qwen = {"vision_config": {}, "image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652}
    seen = vision_language(folder_of(tmp_path, architectures=["Qwen2_5_VLForConditionalGeneration"], **qwen))
    assert seen == ("Qwen2_5_VLForConditionalGeneration", {151_655, 151_656})
    gemma = {"vision_config": {}, "image_token_index": 262_144, "boi_token_index": 255_999}
    seen = vision_language(folder_of(tmp_path, architectures=["Gemma3ForConditionalGeneration"], **gemma))
    assert seen == ("Gemma3ForConditionalGeneration", {262_144})


def test_a_model_of_text_alone_is_none(tmp_path: Path) -> None:
    assert vision_language(folder_of(tmp_path, architectures=["Gemma3ForCausalLM"], image_token_index=1)) is None


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
        {"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {}},
        {"vision_config": {}},
    ],
)
def test_what_no_run_has_shown_is_refused_with_what_can_be_trained(tmp_path: Path, config: dict[str, Any]) -> None:
    said = (
        r"is a multimodal model \(.+\); a run can train the text model of Gemma3ForConditionalGeneration, .*Qwen2_5_VL"
    )
    with pytest.raises(ConfigError, match=f"model.path: {tmp_path} {said}"):
        vision_language(folder_of(tmp_path, **config))


@pytest.mark.parametrize(
    ("weight", "is_one"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", True),
        ("language_model.model.layers.0.mlp.up_proj.weight", True),
        ("model.layers.0.mlp.up_proj.weight", True),
        ("model.visual.blocks.0.mlp.up_proj.weight", False),
        ("visual.blocks.0.mlp.up_proj.weight", False),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", False),
        ("model.multi_modal_projector.linear_1.weight", False),
    ],
)
def test_weights_of_towers_are_told_by_their_names(weight: str, is_one: bool) -> None:
    assert is_of_text_model(weight) is is_one
