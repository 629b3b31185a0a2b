"""Small random vision-language checkpoints, built locally, each with a tokenizer that knows the token of an image.

Guarantee: equal arguments give equal files. The vision tower has linear layers of the names that the text model has, so that
whatever takes modules by name alone shows.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.integration.models import char_tokenizer, save_random

IMAGE = "<image>"
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
_PATCHES = {"num_heads": 2, "depth": 1, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
_PARTIAL = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def build_vision_model(family: str, folder: Path, seed: int = 0, num_layers: int = 2) -> Path:
    """Writes a checkpoint of `family`, one of the cases below, with its tokenizer to `folder`, in float32."""
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    image: int = tokenizer.convert_tokens_to_ids(IMAGE)
    text: dict[str, Any] = _TEXT | {
        "num_hidden_layers": num_layers,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model: Any
    match family:
        case "gemma3":
            text |= {"head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32}
            vision = _LAYERS | {"image_size": 28, "patch_size": 14}
            config = Gemma3Config(
                text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=image
            )
            model = Gemma3ForConditionalGeneration(config)
        case "qwen2_5_vl":
            text |= {"rope_parameters": _MROPE}
            vision = _PATCHES | {"fullatt_block_indexes": [0]}
            model = Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=image, video_token_id=image)
            )
        case "qwen3_vl":
            text |= {"rope_parameters": _MROPE | {"mrope_interleaved": True}, "head_dim": 32}
            vision = _PATCHES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
            model = Qwen3VLForConditionalGeneration(
                Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=image, video_token_id=image)
            )
        case "gemma4":
            text |= {"head_dim": 32, "global_head_dim": 32, "sliding_window": 64, "num_kv_shared_layers": 0}
            text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": len(tokenizer)}
            text |= {"layer_types": ["sliding_attention", "full_attention"][-num_layers:]}
            vision = _LAYERS | {"num_key_value_heads": 2, "head_dim": 16}
            ends = {"boi_token_id": 3, "eoi_token_id": 4, "video_token_id": None, "audio_token_id": None}
            model = Gemma4ForConditionalGeneration(
                Gemma4Config(text_config=text, vision_config=vision, audio_config=None, image_token_id=image, **ends)
            )
        case "qwen3_5":
            text |= {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"][-num_layers:]}
            text |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 4}
            text |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # as vLLM's kernel for CPUs has them
            text |= {"rope_parameters": _MROPE | _PARTIAL}
            vision = _PATCHES | {"num_position_embeddings": 16, "patch_size": 16}
            model = Qwen3_5ForConditionalGeneration(
                Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=image, video_token_id=image)
            )
        case "mistral3":
            text |= {"model_type": "mistral", "head_dim": 32, "sliding_window": None}
            vision = _LAYERS | {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}
            model = Mistral3ForConditionalGeneration(
                Mistral3Config(
                    text_config=text, vision_config=vision, image_token_index=image, tie_word_embeddings=False
                )
            )
        case _:
            raise ValueError(family)
    embedding_std = 0.06 if family.startswith("gemma") else 0.5  # Gemma multiplies embeddings by sqrt(hidden_size)
    return save_random(model, tokenizer, folder, embedding_std)
