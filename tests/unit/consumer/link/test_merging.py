"""Adapters that the trainer merges: the merged model computes what base and adapter compute, and begins as the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from consumer.learn.loss import ReferencePolicy
from consumer.link.merging import BEGINNING_FILE, adapt, load_beginning, merged_weight, merged_weights, save_beginning
from consumer.link.weight_snapshots import WeightSnapshots, check_names
from protocol.errors import ConfigError
from protocol.wire.weight_patch import parse
from tests.integration.models import build_model

METHODS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "DoRA of other ranks": {"use_dora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "DoRA, scaled by the root": {"use_dora": True, "use_rslora": True},
    "ranks and alphas": {"rank_pattern": {"q_proj": 2, "down_proj": 7}, "alpha_pattern": {"v_proj": 3}},
    "PiSSA": {"init_lora_weights": "pissa"},
    "PiSSA, fast": {"init_lora_weights": "pissa_niter_4", "rank_pattern": {"q_proj": 2}},
    "OLoRA": {"init_lora_weights": "olora"},
    "PiSSA with DoRA": {"init_lora_weights": "pissa", "use_dora": True},
    "modules": {"modules_to_save": ["lm_head", "norm"]},
    "modules with DoRA": {"modules_to_save": ["embed_tokens"], "use_dora": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head and embeddings are two tensors."""
    return build_model("llama", tmp_path_factory.mktemp("llama") / "model", num_layers=1)


def adapted(folder: Path, dtype: torch.dtype, *, seed: int = 0, **options: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.manual_seed(seed)
    common = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return adapt(base, LoraConfig(**common | options))


def train(model: Any, scale: float = 0.05) -> None:
    """Move everything that trains."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter)


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 40)[None]).logits.log_softmax(-1)


@pytest.mark.long
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_the_merged_model_computes_what_base_and_adapter_do(model: Path, options: dict[str, Any]) -> None:
    """In float64, and the reference policy is the checkpoint. SVD and QR are PEFT's in float32, so a base that lost a part is
    cast after that."""
    policy = adapted(model, torch.float32, **options).double()
    for module in policy.modules():
        if hasattr(module, "begun"):
            w, a, b = (each.double() for each in module.begun)
            module.begun = type(module.begun)(w, a, b)
            module.get_base_layer().weight.data = w - module.scaling["default"] * b @ a
            for magnitude in module.lora_magnitude_vector.values():
                magnitude.weight.data = torch.linalg.norm(w, dim=1)
    begins = "init_lora_weights" in options
    reference = ReferencePolicy(policy, get_peft_model_state_dict(policy) if begins else None)
    train(policy)
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    before = logprobs(merged)
    parameters = dict(merged.named_parameters())
    with torch.no_grad():
        for each in merged_weights(policy):
            assert each.now().dtype == torch.float64
            parameters[each.name].copy_(each.now())
    torch.testing.assert_close(logprobs(merged), logprobs(policy), rtol=0, atol=1e-10)
    assert (logprobs(merged) - before).abs().max() > 0.01
    with reference:
        torch.testing.assert_close(logprobs(policy), before, rtol=0, atol=1e-10)
    torch.testing.assert_close(logprobs(merged), logprobs(policy), rtol=0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_a_run_begins_at_the_checkpoint_bit_for_bit_and_trains_in_float32(model: Path, options: dict[str, Any]) -> None:
    policy = adapted(model, torch.bfloat16, **options)
    assert {each.dtype for each in policy.parameters() if each.requires_grad} == {torch.float32}
    snapshots = WeightSnapshots(policy)
    check_names(policy, model)
    assert parse(snapshots.take().published(0).data).tensors == []
    train(policy)
    changed = {each.name: each for each in parse(snapshots.take().published(1).data).tensors}
    base = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).named_parameters())
    for each in merged_weights(policy):
        bits = each.now().to(torch.bfloat16).view(torch.int16)
        assert changed[each.name].num_changes == int((bits != base[each.name].view(torch.int16)).sum())
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert ("lm_head.weight" in changed) == ("lm_head" in options.get("modules_to_save", ()))


@pytest.mark.long
def test_an_adapter_begins_as_the_one_that_was_saved(model: Path, tmp_path: Path) -> None:
    """A fast SVD draws numbers, which another device would not draw."""
    first, second = (adapted(model, torch.bfloat16, init_lora_weights="pissa_niter_0", seed=seed) for seed in (0, 1))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert not torch.equal(first.state_dict()[name], second.state_dict()[name])
    save_beginning(first, tmp_path)
    load_beginning(second, tmp_path)
    expected = first.state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in second.state_dict().items())
    assert parse(WeightSnapshots(second).take().published(0).data).tensors == []
    train(first), train(second)
    for one, other in zip(merged_weights(first), merged_weights(second), strict=True):
        assert torch.equal(one.now(), other.now())

    with pytest.raises(ConfigError, match=BEGINNING_FILE):
        load_beginning(adapted(model, torch.bfloat16, init_lora_weights="pissa", r=3), tmp_path)
    (tmp_path / BEGINNING_FILE).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=BEGINNING_FILE):
        load_beginning(second, tmp_path)
    (tmp_path / BEGINNING_FILE).unlink()
    with pytest.raises(ConfigError, match=BEGINNING_FILE):
        load_beginning(second, tmp_path)
    save_beginning(adapted(model, torch.bfloat16, use_dora=True), tmp_path)
    assert not (tmp_path / BEGINNING_FILE).exists()


def test_dora_by_hand() -> None:
    """W = [[3, 4], [-0, 2]], s B A = [[0, 4], [0, 0]] and m = (10, 1): M = [[3, 8], [-0, 2]], and |M| = (sqrt(73), 2)."""
    base = torch.nn.Module()
    base.layer = torch.nn.Linear(2, 2, bias=False)
    base.layer.weight.data = torch.tensor([[3.0, 4.0], [-0.0, 2.0]])
    base.config = {"model_type": "none"}
    config = LoraConfig(r=1, lora_alpha=2, target_modules=["layer"], use_dora=True)
    layer = adapt(base, config).get_base_model().layer
    assert torch.equal(merged_weight(layer).view(torch.int32), base.layer.get_base_layer().weight.view(torch.int32))
    layer.lora_A["default"].weight.data = torch.tensor([[0.0, 1.0]])
    layer.lora_B["default"].weight.data = torch.tensor([[2.0], [0.0]])
    layer.lora_magnitude_vector["default"].weight.data = torch.tensor([10.0, 1.0])
    expected = torch.tensor([[30 / 73**0.5, 80 / 73**0.5], [-0.0, 1.0]])
    torch.testing.assert_close(merged_weight(layer), expected, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"target_modules": ["embed_tokens"]}, "embed_tokens is a Embedding"),
        ("qwen2", {"modules_to_save": ["embed_tokens"]}, "model.embed_tokens.weight is one tensor"),
        ("qwen2", {"modules_to_save": ["lm_head"]}, "lm_head.weight is one tensor"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(
    tmp_path: Path, family: str, options: dict[str, Any], named: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(build_model(family, tmp_path / "model", num_layers=1))
    with pytest.raises(ConfigError, match=named):
        adapt(base, LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options))


def test_an_update_that_rounding_takes_away_is_named_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = adapted(model, torch.bfloat16, use_dora=True)
    snapshots = WeightSnapshots(policy)
    train(policy, scale=0.5)
    snapshots.take().published(1)
    assert caplog.records == []
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data *= 1.0 + 1e-5
    snapshots = WeightSnapshots(fresh := adapted(model, torch.bfloat16, rank_pattern={"q_proj": 2}))
    train(fresh, scale=1e-5)
    for version in (1, 2):
        snapshots.take().published(version)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "policy v1" in caplog.text
