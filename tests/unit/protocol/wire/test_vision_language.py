"""Which checkpoints see, and which of their tokens and weights are of that."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.wire.model_check import is_of_text_model
from protocol.wire.model_folder import ANY_SIZE, vision_language, vocabulary_size


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
    ("config", "placeholders"),
    [
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "image_token_index": 7}, {7}),
        ({"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {}, "audio_token_id": 8}, {8}),
        ({"vision_config": {}, "audio_config": None, "video_token_id": None}, set()),
        ({"vision_encoder_config": {}, "image_token_id": 1, "audio_token_id": 2, "eoi_token_id": 3}, {1, 2}),
    ],
)
def test_no_architecture_is_known_by_name(tmp_path: Path, config: dict[str, Any], placeholders: set[int]) -> None:
    seen = vision_language(folder_of(tmp_path, **config))
    assert seen == ((config.get("architectures") or ["of no architecture"])[0], placeholders)


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
        ("model.embed_audio.embedding_projection.weight", False),
    ],
)
def test_weights_of_towers_are_told_by_their_names(weight: str, is_one: bool) -> None:
    assert is_of_text_model(weight) is is_one


@pytest.mark.parametrize(
    ("config", "size"),
    [({"vocab_size": 7}, 7), ({"text_config": {"vocab_size": 8}, "vision_config": {}}, 8), ({}, ANY_SIZE)],
)
def test_the_size_of_the_vocabulary(tmp_path: Path, config: dict[str, Any], size: int) -> None:
    assert vocabulary_size(folder_of(tmp_path, **config)) == size
