"""A model is tried before it trains: windows, rows in company, the head. What fails takes another way, or is refused."""

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from consumer.learn.forward import Logits, Tokens
from consumer.learn.model import text_model
from consumer.learn.row_passes import RowPasses
from consumer.learn.trial import company_problem
from consumer.link.snapshots import AdapterSnapshots
from consumer.ranks.exchange import ALONE
from protocol.errors import ConfigError
from tests.integration.models import build_model
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.learn.test_tree_attention import EXPERTS, SHAPE, with_layers
from tests.unit.consumer.trl_reference import slipstream_trainer

SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"], "use_sliding_window": True}
MASKED = {  # the window is in the mask alone
    "phimoe": EXPERTS,
    "qwen2_moe": EXPERTS | SLIDING | {"shared_expert_intermediate_size": 16},
    "doge": {},
}
ENGINE = 1024


def build(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    config = AutoConfig.for_model(
        family, **SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": ENGINE} | settings
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model


def passes(model: Any, tmp_path: Path, length: int = ENGINE, **sections: Any) -> RowPasses:
    options = SimpleNamespace(temperature=0.7, cast_lm_head_to_fp32=False, model_init_kwargs={})
    config = run_config(tmp_path, engine={"max_model_len": length}, **sections)
    return RowPasses(model, config, options, 0.0, ALONE, contextlib.nullcontext)


def chosen(model: Any, tmp_path: Path, **options: Any) -> RowPasses:
    found = passes(model, tmp_path, **options)
    found.choose()
    return found


def rows(*lengths: int) -> Tokens:
    """Of one prompt of 5 tokens, and completions of these lengths."""
    ids = torch.arange(len(lengths) * (5 + max(lengths))).view(len(lengths), -1) % 37 + 1
    ids[:, :5] = ids[0, :5]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return Tokens(ids, torch.cat([torch.ones(len(lengths), 5, dtype=torch.long), mask], 1), mask)


def own_logprobs(model: Any, tokens: Tokens) -> torch.Tensor:
    """Of each row alone, from the logits of the model's own pass."""
    found = torch.zeros(tokens.loss_mask.shape)
    for row, ids in enumerate(tokens.ids):
        ids = ids[tokens.mask[row].bool()]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, 4:-1] / 0.7
        found[row, : len(ids) - 5] = logits.log_softmax(-1).gather(1, ids[5:, None])[:, 0]
    return found


def check(model: Any, way: RowPasses, *lengths: int) -> None:
    """Log-probs are those of rows alone, and have a gradient."""
    tokens = rows(*lengths)
    ours = way(way.layout(tokens), entropy_trains=True)
    torch.testing.assert_close(ours.logprobs, own_logprobs(model, tokens), atol=2e-4, rtol=0)
    weight = model.get_input_embeddings().weight.requires_grad_()
    gradients = [
        torch.autograd.grad((each * torch.arange(float(each.numel())).view(each.shape).sin()).sum(), [weight])[0]
        for each in (way(way.layout(tokens), entropy_trains=True).logprobs, own_logprobs(model, tokens))
    ]
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("window", [24, 300])
@pytest.mark.parametrize("family", MASKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_only_the_mask_has_is_seen(family: str, window: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(family, dtype, **MASKED[family] | {"sliding_window": window})
    way = chosen(model, tmp_path)
    assert way.kernel is None
    if dtype == torch.float32:
        check(model, way, 60, 40)


def test_a_window_that_layers_know_is_that_of_trees(tmp_path: Path) -> None:
    model = build("mistral", sliding_window=300)
    way = chosen(model, tmp_path)
    assert way.kernel is not None
    assert model.config.sliding_window == 300
    check(model, way, 350, 40)


def that_forgets(attend: Any, *arguments: Any, tree: Any = None, **options: Any) -> Any:
    """As a layer with a window that no number names."""
    found, weights = attend(*arguments, tree=tree, **options) if tree is not None else attend(*arguments, **options)
    far = torch.arange(found.shape[1]) >= 100
    return (found * torch.where(far, 0.5, 1.0)[:, None] if tree is None else found), weights


def test_what_only_long_rows_show_is_seen(tmp_path: Path) -> None:
    assert chosen(with_layers(build("llama"), that_forgets), tmp_path).kernel is None


@pytest.mark.parametrize("family", ["bert", "roformer"])
def test_a_model_whose_tokens_see_later_ones_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^model.path: .* cannot be trained in company: .* a longer one is beside it"
    ):
        chosen(build(family, is_decoder=False), tmp_path)


def test_positions_that_a_model_scales_itself_are_seen(tmp_path: Path) -> None:
    """As those of code that comes with a model: by the longest row of a pass."""
    model = build("llama")
    rotary = model.model.rotary_emb
    compute = rotary.forward

    def by_length(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        scale = 2.0 if int(position_ids.max()) >= 512 else 1.0
        return compute(x, position_ids / scale)

    rotary.forward = by_length
    with pytest.raises(ConfigError, match=r"beside a row of 1024 tokens; a lower engine.max_model_len helps"):
        chosen(model, tmp_path)
    assert company_problem(model, 512) is None


def test_what_a_pass_leaves_for_the_next_is_seen() -> None:
    model = build("llama")
    rotary, longest = model.model.rotary_emb, [0]
    compute = rotary.forward

    def with_memory(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        found = compute(x, position_ids / (1 + longest[0] // 512))
        longest[0] = max(longest[0], int(position_ids.max()))
        return found

    rotary.forward = with_memory
    assert "behind a row of 1024 tokens" in str(company_problem(model, 1024))


UNKNOWN = {
    "inkling_text": {"head_dim": 16},
    "recurrent_gemma": {"block_types": ["attention"], "lru_width": 32, "head_dim": 16},
}


@pytest.mark.long
@pytest.mark.parametrize("family", UNKNOWN)
def test_logits_that_are_made_otherwise_are_the_models_own(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(family, **UNKNOWN[family])
    with caplog.at_level(logging.INFO):
        way = chosen(model, tmp_path)
    assert way.logits is None
    assert "log-probs are made from whole logits" in caplog.text
    check(model, way, 12, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.9, 1.0])
def test_a_factor_that_no_configuration_names_is_seen(scale: float, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build("llama", dtype)
    forward = model.forward

    def scaled(*arguments: Any, **options: Any) -> Any:
        found = forward(*arguments, **options)
        found.logits = found.logits * scale
        return found

    model.forward = scaled
    way = chosen(model, tmp_path)
    assert way.logits == (Logits() if scale == 1.0 else None)
    if dtype == torch.float32:
        check(model, way, 12, 7)


@pytest.mark.long
def test_divergences_are_refused_where_logits_are_the_models_own(tmp_path: Path) -> None:
    model = build("inkling_text", **UNKNOWN["inkling_text"])
    teachers = {
        "teachers": [{"name": "large", "url": "http://localhost:1"}],
        "distillation": {"mode": "divergence", "top_k": 4},
    }
    way = passes(model, tmp_path, **teachers)
    with pytest.raises(ConfigError, match=r"distillation\.mode"):
        way.choose()


def test_llama_4_of_text_alone(tmp_path: Path) -> None:
    """The family's `base_model` is the whole model."""
    settings = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "head_dim": 16}
    model = build("llama4_text", **settings)
    assert text_model(model) is model.model
    check(model, chosen(model, tmp_path), 12, 7)


@pytest.mark.long
@pytest.mark.parametrize("also", ["q_proj", "lm_head"])
def test_an_adapter_of_embeddings(also: str, tmp_path: Path) -> None:
    """PEFT's wrapper has not all attributes of the module in it. The base's embeddings do not travel with a policy."""
    folder = build_model("llama", tmp_path / "model", num_layers=1)
    config = run_config(tmp_path, folder, lora={"target_modules": ["embed_tokens", also]}, swap={"probe_every": 0})
    if also == "lm_head":
        with pytest.raises(ConfigError, match="leave it out"):
            slipstream_trainer(config, folder)
        return
    trainer = slipstream_trainer(config, folder)
    assert trainer.row_passes.kernel is not None
    tokens = rows(6, 4)
    way = trainer.row_passes(trainer.row_passes.layout(tokens), entropy_trains=False)
    adapted = trainer.model.eval()(input_ids=tokens.ids).logits[:, 4:-1] / trainer.args.temperature
    expected = adapted.log_softmax(-1).gather(2, tokens.completion_ids[..., None])[..., 0] * tokens.loss_mask
    torch.testing.assert_close(way.logprobs, expected, atol=1e-4, rtol=0)
    names = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(way.logprobs.sum(), [trainer.model.get_parameter(name) for name in sorted(names)])
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    assert any("embed_tokens.lora_embedding_A" in name for name in names)
    assert set(AdapterSnapshots(trainer.model)._parameters) == {name.replace(".default", "") for name in names}
