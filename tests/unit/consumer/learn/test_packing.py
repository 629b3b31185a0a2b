"""Rows are packed only where no layer carries anything from one row to the next, whatever the model is made of.

Attention of variable length is a kernel of GPUs; the one here computes the same on a CPU: rows begin where positions begin anew.
All comparisons are in float64, with each row computed alone as the reference.
"""

import contextlib
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from consumer.learn import forward
from consumer.learn.forward import Layout, Tokens, hidden_states, is_packable, is_shareable, keeps_rows_apart
from tests.unit.consumer.learn.test_forward import tokens

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ATTENTION = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"head_dim": 16, "sliding_window": 4},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Mixtral": EXPERTS,
    "Qwen3Moe": EXPERTS | {"head_dim": 16},
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
RECURRENT = {
    "Qwen3Next": EXPERTS
    | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_dt_rank": 4, "mamba_d_state": 8},
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
}
UNLISTED = {"RecurrentGemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "head_dim": 16}}
"""Its configuration does not say that it has recurrent layers."""


def build(family: str, **settings: Any) -> Any:
    config: PreTrainedConfig = getattr(transformers, f"{family}Config")(**SHAPE | settings)
    config._experts_implementation = "eager"  # the others take no float64
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).double().eval().requires_grad_(False)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", varlen_attention)
    monkeypatch.setitem(
        transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
        "flash_attention_2",
        flash_attention_mask,
    )


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **options: Any,
) -> Any:
    """As transformers calls the kernel: without where they begin it knows of no rows."""
    assert attention_mask is None
    places = torch.arange(query.shape[2])
    sees = places[:, None] >= places
    if sliding_window is not None:
        sees &= places[:, None] - places < sliding_window
    if cu_seq_lens_q is not None and len(query) == 1:
        assert cu_seq_lens_q.dtype == torch.int32
        assert type(max_length_q) is type(max_length_k) is int
        assert max_length_k == max_length_q == int(cu_seq_lens_q.diff().max())
        assert cu_seq_lens_k is cu_seq_lens_q
        assert cu_seq_lens_q[-1] == len(places)
        row = torch.searchsorted(cu_seq_lens_q.long(), places, right=True)
        sees &= row[:, None] == row
    options.pop("softcap", None)  # SDPA has none
    return sdpa_attention_forward(module, query, key, value, sees[None, None], **options)


def with_flash(model: Any) -> Any:
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def hidden(model: Any, layout: Layout) -> torch.Tensor:
    return hidden_states(model.base_model, layout)


def alone(model: Any, rows: Tokens) -> torch.Tensor:
    """As `hidden_states`, one row after the other."""
    result = []
    for row, mask, in_loss in zip(rows.ids, rows.mask.bool(), rows.in_loss, strict=True):
        hidden = model.base_model(input_ids=row[mask][None], use_cache=False).last_hidden_state[0]
        result.append(hidden[-int(in_loss.sum()) - 1 : -1])
    return torch.cat(result)


def left_padded(model: Any, rows: Tokens) -> torch.Tensor:
    """As TRL does it, where a model is not ours to compute."""
    hidden = model.base_model(input_ids=rows.ids, attention_mask=rows.mask, use_cache=False).last_hidden_state
    return hidden[:, -rows.width - 1 : -1][rows.in_loss]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest, as a share of the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("family", ATTENTION)
def test_attention_alone_is_packed(flash: None, family: str) -> None:
    model = with_flash(build(family, **ATTENTION[family]))
    assert is_packable(model)
    assert difference(hidden(model, forward.packed_layout(tokens())), alone(model, tokens())) < 1e-12


@pytest.mark.parametrize("family", RECURRENT | UNLISTED)
def test_what_carries_a_state_on_is_not_packed(flash: None, family: str) -> None:
    model = with_flash(build(family, **(RECURRENT | UNLISTED)[family]))
    expected = alone(model, tokens())
    assert not is_packable(model)
    assert not keeps_rows_apart(model)
    with contextlib.suppress(ValueError):  # transformers 5.23 refuses some of them itself
        assert difference(hidden(model, forward.packed_layout(tokens())), expected) > 1e-4, "it would be wrong"
    assert difference(hidden(model, forward.lay_out(tokens())), expected) < 1e-12


@pytest.mark.parametrize("family", ATTENTION | RECURRENT)
def test_rows_and_shared_prompts_are_those_of_rows_alone(family: str) -> None:
    """On SDPA. Padding is behind the rows there, where nothing comes after it; TRL's is before them, where masks keep it out."""
    model = build(family, **(ATTENTION | RECURRENT)[family])
    expected = alone(model, tokens())
    assert is_shareable(model) == (family in ("Llama", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"))
    assert difference(hidden(model, forward.rows_layout(tokens())), expected) < 1e-12
    if family != "Gemma2":  # from transformers 5.21 on its padding is NaN, and stays so
        assert difference(left_padded(model, tokens()), expected) < 1e-6, "angles of positions are float32"
    if is_shareable(model):
        assert difference(hidden(model, forward.shared_layout(tokens())), expected) < 1e-12


def test_a_model_that_does_not_tell_its_attention_where_rows_begin_is_not_packed(
    flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_flash(build("Llama"))
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        monkeypatch.setattr(
            layer.self_attn, "forward", lambda *a, attend=attend, cu_seq_lens_q=None, **options: attend(*a, **options)
        )
    assert not is_packable(model)


def test_a_model_that_refuses_packed_rows_gets_padded_ones(flash: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_flash(build("Llama"))

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("cannot keep packed sequences apart")

    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", refuse)
    assert not is_packable(model)


def test_layers_that_transformers_does_not_know_are_neither_packed_nor_shared(
    flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_flash(build("Llama", layer_types=["full_attention"] * 2))
    assert is_packable(model)
    assert is_shareable(model)
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "retention"])
    assert not is_packable(model)
    assert not is_shareable(model)


def test_packing_needs_a_kernel_of_variable_length() -> None:
    assert not is_packable(build("Llama"))
