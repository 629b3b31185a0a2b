"""The layers that keep tokens, for real families, against what vLLM's own specs of a KV cache ask for."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from protocol.gpu.cache_layers import CacheLayer, cache_layers, numbers_of_row
from protocol.gpu.memory import engine_needs, row_bytes
from protocol.gpu.model_files import model_shape
from protocol.gpu.weights import Weight
from tests.unit.protocol.gpu.models import CONFIG, run_of, write_model

FULL, WINDOW = "full_attention", "sliding_attention"
WITH_TYPES = (
    "qwen2", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "cohere2", "gpt_oss", "qwen3_next", "qwen3_5_text",
    "lfm2", "jamba", "llama4_text", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2", "minimax", "olmo3", "exaone4",
    "smollm3", "kimi_linear", "ministral", "afmoe",
)  # fmt: skip


def values_of(family: str) -> tuple[Any, dict[str, Any]]:
    config = CONFIG_MAPPING[family]()
    return config, json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("family", [family for family in WITH_TYPES if family in CONFIG_MAPPING])
def test_layers_of_families_that_name_them(family: str) -> None:
    config, values = values_of(family)
    kept = config.num_hidden_layers - (values.get("num_kv_shared_layers") or 0)
    types = (getattr(config, "layer_types", None) or config.layers_block_type)[:kept]
    layers = cache_layers(values, [], config.num_hidden_layers, 64)
    num_full = sum(each in (FULL, "hybrid") for each in types)
    num_windowed = sum(each in (WINDOW, "chunked_attention") for each in types)
    assert sum(layer.num_tokens is None for layer in layers) == num_full
    assert len(layers) == num_full + num_windowed
    window = values.get("attention_chunk_size") or values.get("sliding_window")
    assert {layer.num_tokens for layer in layers} <= {None, window}


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "gemma3n_text", "cohere2", "gpt_oss", "llama4_text", "olmo3"]
)
def test_what_a_configuration_leaves_out_counts_no_more(family: str) -> None:
    config, values = values_of(family)
    whole = cache_layers(values, [], config.num_hidden_layers, 64)
    without = {key: value for key, value in values.items() if key not in ("layer_types", "layers_block_type")}
    less = cache_layers(without, [], config.num_hidden_layers, 64)
    for length in (100, 10_000, 100_000):
        assert numbers_of_row(less, length) <= numbers_of_row(whole, length)


def attention(layer: int, keys: int, values: int | None = None) -> list[Weight]:
    name = f"model.layers.{layer}.self_attn."
    made = [Weight(f"{name}q_proj.weight", (64, 64), 16), Weight(f"{name}k_proj.weight", (keys, 64), 16)]
    return made if values is None else [*made, Weight(f"{name}v_proj.weight", (values, 64), 16)]


def test_layers_by_the_names_and_sides_of_their_weights() -> None:
    mamba = Weight("model.layers.1.mamba.in_proj.weight", (64, 64), 16)
    weights = [*attention(0, 8, 16), mamba, *attention(2, 8)]
    assert cache_layers({}, weights, 3, 99) == (CacheLayer(24), CacheLayer(8))
    assert cache_layers({}, [mamba], 3, 99) == ()
    latent = [Weight("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 64), 16)]
    assert cache_layers({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, latent, 1, 99) == (CacheLayer(576),)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"sliding_window": 4}, [4, 4, 4, 4]),
        ({"sliding_window": 4, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 4]),
        ({"sliding_window": 4, "sliding_window_pattern": 2}, [4, None, 4, None]),
        ({"attention_chunk_size": 6, "no_rope_layers": [1, 1, 0, 1]}, [6, 6, None, 6]),
        ({"hybrid_override_pattern": "M-M*"}, [None]),
        ({"attn_layer_indices": [0, 2]}, [None, None]),
        ({"full_attention_interval": 4}, [None]),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, [None, None]),
        ({"linear_attn_config": {"full_attn_layers": [4]}}, [None]),
        ({"num_kv_shared_layers": 3}, [None]),
        ({"use_cla": True, "cla_share_factor": 2}, [None, None]),
    ],
)
def test_layers_by_what_configurations_say(config: dict[str, Any], windows: list[int | None]) -> None:
    assert [layer.num_tokens for layer in cache_layers(config, [], 4, 8)] == windows


def test_a_row_by_hand() -> None:
    layers = (CacheLayer(8), CacheLayer(8, 4), CacheLayer(2, 100))
    assert numbers_of_row(layers, 10) == 80 + 32 + 20
    assert numbers_of_row(layers, 3) == 24 + 24 + 6


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [(None, 2), ("auto", 2), ("bfloat16", 2), ("fp8_e4m3", 1), ("int8_per_token_head", 1), ("nvfp4", 0.375)],
)
def test_bytes_of_numbers_in_the_formats_of_a_cache(tmp_path: Path, kind: str | None, num_bytes: float) -> None:
    folder = write_model(tmp_path / "model", CONFIG)
    config = run_of(folder, engine={} if kind is None else {"kv_cache_dtype": kind})
    assert row_bytes(config, model_shape(folder), 10) == 2 * 8 * 10 * num_bytes


def test_an_engine_loads_eight_bits_as_they_are_and_no_layers_for_speculation(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", CONFIG)
    model, config = model_shape(folder), run_of(folder)
    weights = (
        Weight("model.layers.0.mlp.up_proj.weight", (8, 4), 8, False),
        Weight("model.layers.2.eh_proj.weight", (8, 4), 16),
    )
    changed = engine_needs(config, SimpleNamespace(**vars(model) | {"weights": weights}, cache_layers=()))  # type: ignore[arg-type]
    assert changed.weights == 32


def spec_bytes(layers: tuple[CacheLayer, ...], length: int, *, latent: bool) -> int:
    """Return the bytes that vLLM asks for, for one row, with a step of one block."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length), max_in_flight_tokens=16,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )  # fmt: skip
    total = 0
    for layer in layers:
        size = layer.num_numbers if latent else layer.num_numbers // 2
        kind = {"block_size": 16, "num_kv_heads": 1, "head_size": size, "dtype": torch.bfloat16}
        if latent:
            spec = MLAAttentionSpec(**kind)
        elif layer.num_tokens is None:
            spec = FullAttentionSpec(**kind)
        else:
            spec = SlidingWindowSpec(**kind, sliding_window=layer.num_tokens)
        total += spec.max_memory_usage_bytes(config)
    return total


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "deepseek_v2", "qwen3_next"]
)
@pytest.mark.parametrize("length", [100, 5000, 131_072])
def test_the_engine_keeps_no_less_and_little_more(family: str, length: int) -> None:
    config, values = values_of(family)
    layers = cache_layers(values, [], config.num_hidden_layers, 256)
    asked = spec_bytes(layers, length, latent=family == "deepseek_v2")
    least = 2 * numbers_of_row(layers, length)
    assert least <= asked <= least + sum(2 * layer.num_numbers * 48 for layer in layers)
