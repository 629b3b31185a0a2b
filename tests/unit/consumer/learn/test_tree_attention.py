"""Trees are for models of which each token depends on its own path alone, whatever the model is made of; others get plain rows.

All comparisons are in float64, with each row computed alone as the reference.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig

from consumer.learn import tree_attention
from consumer.learn.tree import Row, tree_of
from consumer.learn.tree_attention import IMPLEMENTATION, choose_kernel, tree_pass
from consumer.learn.tree_kernels import SegmentKernel
from tests.unit.consumer.float64 import in_float64
from tests.unit.consumer.learn.trees import some_rows

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ATTENTION = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"head_dim": 16, "sliding_window": 4, "attn_logit_softcapping": None},
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


def alone(model: Any, rows: list[Row]) -> torch.Tensor:
    """Hidden states of all tokens, row by row."""
    ids = [torch.from_numpy(np.concatenate(row))[None] for row in rows]
    return torch.cat([model.base_model(input_ids=each, use_cache=False).last_hidden_state[0] for each in ids])


def in_tree(model: Any, rows: list[Row]) -> torch.Tensor:
    """The same, from one pass."""
    tree = tree_of(rows)
    ids, positions = (torch.from_numpy(each)[None] for each in (tree.ids, tree.positions))
    hidden = tree_pass(model.base_model, ids, positions, SegmentKernel(tree))[0]
    return torch.cat([hidden[torch.from_numpy(places)] for places in tree.places])


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest, as a share of the largest number."""
    return float((ours - theirs).detach().abs().max() / theirs.abs().max())


def exactly(model: Any) -> AbstractContextManager[None]:
    """Norms and softmax in float64 too."""
    return in_float64(sys.modules[type(model).__module__])


def of_embeddings(model: Any, find: Callable[[Any, list[Row]], torch.Tensor]) -> torch.Tensor:
    weight = model.get_input_embeddings().weight.requires_grad_()
    found = find(model, some_rows())
    [gradient] = torch.autograd.grad((found * torch.arange(found.numel()).view(found.shape).sin()).sum(), [weight])
    return gradient


@pytest.mark.long
@pytest.mark.parametrize("family", ATTENTION)
def test_attention_alone_takes_trees(family: str) -> None:
    model = build(family, **ATTENTION[family])
    rows = some_rows()
    with exactly(model):
        expected, gradient = alone(model, rows), of_embeddings(model, alone)
        assert choose_kernel(model) is not None
        assert difference(in_tree(model, rows), expected) < 1e-10
        assert difference(of_embeddings(model, in_tree), gradient) < 1e-10
        assert difference(alone(model, rows), expected) < 1e-10, "other passes are as before"


def test_float32_weights_under_autocast_take_trees() -> None:
    """Behind the rotation queries and keys are in float32 there, and values are not."""
    model = build("Llama").float()
    with torch.autocast("cpu", torch.bfloat16):
        assert choose_kernel(model) is not None
        assert difference(in_tree(model, some_rows()), alone(model, some_rows())) < 0.05
        assert difference(of_embeddings(model, in_tree), of_embeddings(model, alone)) < 0.05


def test_the_softcap_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA has none, and refuses one from transformers 5.23 on; transformers' own computation has it."""
    attend = tree_attention.sdpa_attention_forward

    def refuses(*arguments: Any, softcap: float | None = None, **options: Any) -> Any:
        assert softcap is None
        return attend(*arguments, **options)

    monkeypatch.setattr(tree_attention, "sdpa_attention_forward", refuses)
    settings = ATTENTION["Gemma2"] | {"attn_logit_softcapping": 0.5}
    model, reference = build("Gemma2", **settings), build("Gemma2", **settings)
    reference.set_attn_implementation("eager")
    assert choose_kernel(model) is not None
    with exactly(model):
        expected = alone(reference, some_rows())
        assert difference(in_tree(model, some_rows()), expected) < 1e-10


def test_eager_is_a_wish_only_where_the_file_has_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers chooses it itself for a model that its SDPA does not fit, such as Gemma 2 from 5.23 on."""
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", False)
    model = build("Gemma2", **ATTENTION["Gemma2"])
    assert model.config._attn_implementation == "eager"
    with caplog.at_level(logging.INFO):
        assert choose_kernel(model, attention="eager") is None
    assert "attn_implementation is eager" in caplog.text
    assert choose_kernel(model) is not None
    assert model.config._attn_implementation == IMPLEMENTATION


def test_an_attention_that_depends_on_more_gets_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Attention sinks: how far they move hidden states is a matter of their weights."""
    model = build("GptOss", **EXPERTS, head_dim=16, sliding_window=4)
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-9)
    with caplog.at_level(logging.INFO):
        assert choose_kernel(model) is None
    assert "also depends on s_aux" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("family", RECURRENT | UNLISTED)
def test_what_carries_a_state_on_gets_rows(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build(family, **(RECURRENT | UNLISTED)[family])
    before, expected = model.config._attn_implementation, alone(model, some_rows())
    with caplog.at_level(logging.INFO):
        assert choose_kernel(model) is None
    assert model.config._attn_implementation == before != IMPLEMENTATION
    assert "each row is computed as a whole, padded to the longest" in caplog.text
    assert torch.equal(alone(model, some_rows()), expected)


@pytest.mark.parametrize("family", ["RecurrentGemma", "Jamba"])
def test_a_state_that_no_configuration_tells_of_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family, **(RECURRENT | UNLISTED)[family])
    monkeypatch.setattr(tree_attention, "_obstacle", lambda model, attention: None)
    assert choose_kernel(model) is None


def with_layers(model: Any, change: Callable[..., Any]) -> Any:
    """The model, its layers' attention changed."""
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, attend=attend, **options: change(attend, *a, **options)
    return model


def without_the_tree(attend: Any, *arguments: Any, tree: Any = None, **options: Any) -> Any:
    return attend(*arguments, **options)


def that_refuses(attend: Any, *arguments: Any, tree: Any = None, **options: Any) -> Any:
    if tree is not None:
        raise ValueError("no tree, please")
    return attend(*arguments, **options)


def that_attends_otherwise(attend: Any, *arguments: Any, tree: Any = None, **options: Any) -> Any:
    """As attention sinks would."""
    found, weights = attend(*arguments, tree=tree, **options) if tree is not None else attend(*arguments, **options)
    return (-found if tree is not None else found), weights


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_the_tree, "carries something from one row to another"),
        (that_refuses, "ValueError: no tree, please"),
        (that_attends_otherwise, "hidden states differ from those of rows alone, by"),
    ],
)
def test_a_model_whose_layers_cannot_gets_rows(
    change: Callable[..., Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_layers(build("Llama"), change)
    with caplog.at_level(logging.INFO):
        assert choose_kernel(model) is None
    assert said in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layer_types": ["full_attention", "retention"]}, "layers of retention"),
        ({"attn_implementation": "eager"}, "attn_implementation is eager"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_what_a_configuration_tells(settings: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build("Llama")
    for name, value in settings.items():
        setattr(model.config, name.replace("attn_impl", "_attn_impl"), value)
        for layer in model.model.layers:
            setattr(layer.self_attn, name, value)
    with caplog.at_level(logging.INFO):
        assert choose_kernel(model) is None
    assert said in caplog.text


def test_dropout_does_not_disturb_the_trial() -> None:
    model = get_peft_model(build("Llama"), LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear"))
    model.train()
    assert choose_kernel(model.get_base_model()) is not None
    assert model.training
