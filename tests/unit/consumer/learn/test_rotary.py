"""Rotary positions that transformers scales by the longest row of a pass: they are those of the engine, in any company."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from consumer.learn.rotary import engine_lengths, follow_engine
from protocol.errors import ConfigError
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.learn.test_tree_attention import EXPERTS, SHAPE

ORIGINAL, LONGEST = 16, 64
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [float(number) for number in range(1, 9)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL} | FACTORS
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "sliding_window": 8}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
    "phimoe": EXPERTS | {"rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}},
    "gemma3_text": LAYERS | {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": LONGROPE}},
    "llama": {"rope_parameters": DYNAMIC},
    "hunyuan_v1_dense": {"rope_parameters": DYNAMIC | {"alpha": 50.0}, "head_dim": 16},
    "qwen2": {"rope_parameters": DYNAMIC | {"max_trained_positions": 32}},
}


def built(family: str) -> Any:
    values = SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": LONGEST, "initializer_range": 0.15}
    config = AutoConfig.for_model(family, **values | MODELS[family])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def fixed(family: str, tmp_path: Path, length: int) -> Any:
    model = built(family)
    follow_engine(model, run_config(tmp_path, engine={"max_model_len": length}))
    return model


def hidden(model: Any, length: int, positions: torch.Tensor | None = None) -> torch.Tensor:
    ids = torch.arange(2 * length).view(2, length) % 37 + 1
    if positions is None:
        positions = torch.arange(length).expand(2, length)
    with torch.no_grad():
        found: torch.Tensor = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    return found


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("length", [ORIGINAL, LONGEST])
def test_a_row_has_the_same_numbers_in_any_company(family: str, length: int, tmp_path: Path) -> None:
    model = fixed(family, tmp_path, length)
    first = hidden(model, 12)
    far = torch.stack([torch.arange(12), torch.arange(2 * LONGEST - 12, 2 * LONGEST)])
    assert torch.equal(hidden(model, 12, far)[0], first[0])
    hidden(model, 2 * LONGEST)
    assert torch.equal(hidden(model, 12), first)
    torch.testing.assert_close(hidden(model, 2 * LONGEST)[0, :12], first[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "phimoe", "gemma3_text", "llama"])
def test_without_it_they_differ(family: str) -> None:
    model = built(family)
    first, far = hidden(model, 12), torch.stack([torch.arange(12), torch.arange(2 * LONGEST - 12, 2 * LONGEST)])
    assert (hidden(model, 12, far)[0] - first[0]).abs().max() > 1e-3


SCALING = math.sqrt(1.5)  # 1 + log(64 / 16) / log(16) = 1 + log(4) / log(16)


@pytest.mark.parametrize(
    ("family", "length", "name", "factor", "scaling"),
    [
        ("phi3", ORIGINAL, "", 1.0, SCALING),
        ("phi3", ORIGINAL + 1, "", 2.0, SCALING),
        ("phimoe", ORIGINAL, "", 1.0, 1.1),
        ("phimoe", LONGEST, "", 2.0, 1.3),
        ("gemma3_text", LONGEST, "full_attention_", 2.0, SCALING),
        ("llama", LONGEST, "", 1.0, 1.0),
        ("hunyuan_v1_dense", LONGEST, "", 50 ** (2 / 14), 1.0),
        ("qwen2", LONGEST, "", 5 ** (2 / 14), 1.0),  # 4 · 64 / 32 - 3
    ],
)
def test_the_numbers_are_those_of_vllm(
    family: str, length: int, name: str, factor: float, scaling: float, tmp_path: Path
) -> None:
    """By hand: the second of eight frequencies is 10000 ^ (-2 / 16), over its factor."""
    embedding = fixed(family, tmp_path, length).model.rotary_emb
    assert float(getattr(embedding, f"{name}inv_freq")[1]) == pytest.approx(10_000 ** (-1 / 8) / factor)
    assert getattr(embedding, f"{name}attention_scaling") == pytest.approx(scaling)


def test_the_model_keeps_its_configuration(tmp_path: Path) -> None:
    model, other = fixed("phi3", tmp_path, LONGEST), built("phi3")
    assert model.config.rope_parameters == other.config.rope_parameters


@pytest.mark.parametrize(
    ("family", "chosen", "expected"),
    [
        ("phi3", None, (0, 16)),
        ("phi3", 16, (0, 16)),
        ("phi3", 17, (17, 2**63 - 1)),
        ("gemma3_text", None, (17, 2**63 - 1)),
        ("llama", 64, (0, 64)),
        ("llama", 8, (0, 64)),
    ],
)
def test_the_engines_that_compute_so(
    family: str, chosen: int | None, expected: tuple[int, int], tmp_path: Path
) -> None:
    config = run_config(tmp_path, engine={} if chosen is None else {"max_model_len": chosen})
    assert engine_lengths(config, built(family).config) == expected


def test_any_engine_computes_what_no_length_scales(tmp_path: Path) -> None:
    assert engine_lengths(run_config(tmp_path), AutoConfig.for_model("llama")) is None


@pytest.mark.parametrize("engine", [{}, {"max_model_len": 65}])
def test_an_engine_of_dynamic_positions_has_a_most(engine: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^engine.max_model_len: .* set it to 64 or less"):
        engine_lengths(run_config(tmp_path, engine=engine), built("llama").config)
