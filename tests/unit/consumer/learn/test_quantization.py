"""A base in 4 or 8 bits, by the real bitsandbytes: what is trained, and what a swap is proved with."""

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from consumer.learn.model import quantization_config, unquantized_probe
from consumer.learn.options import build_lora, check_optimizer
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.probe import Measurement, PolicyProbe
from producer.engine_contract import Scored
from producer.policies.probe import ReceivedProbe, SwapProof, probe_of
from protocol.config.operation import TOLERANCES
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.wire.messages import PolicyOffer
from replay.batch_selection import TrainingBatch
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import lora_parameters, loss_and_gradients, slipstream_trainer

ROWS = (3 + torch.arange(160).int() * 7 % 40).reshape(2, 80).numpy()


def received(measurement: Measurement | None) -> ReceivedProbe:
    assert measurement is not None
    probe = probe_of(PolicyOffer("0" * 64, "", measurement.probe()))
    assert probe is not None
    return probe


def served_by(model: Any, scale: float = 1.0) -> list[Scored]:
    """What an engine computes that serves this model, with its adapter's scale times `scale`."""
    state = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
    scaled = {name: tensor * (scale if "lora_B" in name else 1.0) for name, tensor in state.items()}
    set_peft_model_state_dict(model, scaled)
    policy = received(PolicyProbe(ROWS, 1, model, nullcontext).measure(0)).policy
    set_peft_model_state_dict(model, state)
    assert policy is not None
    return [Scored(row.tolist()) for row in policy.reshape(len(ROWS), -1)]


FORMATS = {"nf4": torch.uint8, "int8": torch.int8}
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")

needs_library = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def trainer_of(folder: Path, model: Path, quantization: str | None) -> SlipstreamTrainer:
    return slipstream_trainer(config_of(folder, model, quantization), model)


def config_of(folder: Path, model: Path, quantization: str | None) -> RunConfig:
    config = run_config(folder, model)
    return config.model_copy(update={"model": config.model.model_copy(update={"quantization": quantization})})


@pytest.fixture
def like_trained(one_layer_model: Path) -> Any:
    """A base and an adapter in float32, as an engine has them."""
    base: Any = AutoModelForCausalLM.from_pretrained(one_layer_model, dtype=torch.float32)
    return get_peft_model(base, build_lora(run_config(one_layer_model.parent, one_layer_model)))


@pytest.mark.long
@needs_library
@pytest.mark.parametrize("quantization", FORMATS)
def test_a_quantized_base_is_frozen_in_its_format_and_the_adapter_trains_in_float32(
    tmp_path: Path, one_layer_model: Path, quantization: str
) -> None:
    groups = [rollout_group([[3, 4, 5], [6], [7, 8], [9]], prompt=[3, 4])]
    found = []
    for each in (None, quantization):
        trainer = trainer_of(tmp_path / str(each), one_layer_model, each)
        frozen = {p.dtype for n, p in trainer.model.named_parameters() if "proj.base_layer.weight" in n}
        assert frozen == {FORMATS[each] if each else torch.float32}
        assert {parameter.dtype for parameter in lora_parameters(trainer)} == {torch.float32}
        found.append(loss_and_gradients(trainer, trainer._prepare_inputs(trainer.recipe.tensors(groups)))[1])
    exact, rounded = found
    cosine = torch.nn.functional.cosine_similarity(exact, rounded, dim=0)
    assert 0.8 < cosine < 0.99999, "nearly the direction of the whole base, and not exactly"


@pytest.mark.long
@needs_library
@pytest.mark.parametrize("quantization", FORMATS)
def test_a_swap_is_proved_as_narrowly_as_without_quantization(
    tmp_path: Path, one_layer_model: Path, like_trained: Any, quantization: str
) -> None:
    """Engine: the base in float32. The versions are a trained step apart; the format moves log-probs by far more than the
    tolerance, so a probe on the quantized base would prove nothing."""
    trainer = trainer_of(tmp_path, one_layer_model, quantization)
    trained, config = trainer.model, run_config(tmp_path, one_layer_model)
    probe = unquantized_probe(ROWS, 1, config, one_layer_model, build_lora(config), trained)
    states, measured = [], []
    for version in range(2):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in lora_parameters(trainer):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        states.append({name: tensor.clone() for name, tensor in get_peft_model_state_dict(trained).items()})
        measured.append(received(probe.measure(version)))
    on_quantized = received(PolicyProbe(ROWS, 1, trained, trainer.accelerator.autocast).measure(1))

    def served(version: int, scale: float = 1.0) -> list[Scored]:
        set_peft_model_state_dict(like_trained, states[version])
        return served_by(like_trained, scale)

    def refusal(probe: ReceivedProbe, engine: list[Scored]) -> str:
        proof = SwapProof(TOLERANCES["float32"])
        proof.note_base(probe, served(1, 0.0))
        return proof.verdict(probe, engine).refusal

    assert refusal(measured[1], served(1)) == ""
    assert refusal(on_quantized, served(1)) != ""
    for wrong in (served(1, 0.0), served(0), served(1, 0.9)):
        assert "does not compute this policy" in refusal(measured[1], wrong)
    assert received(probe.measure(1)).policy is not None
    assert unquantized_probe(ROWS, 0, config, one_layer_model, build_lora(config), trained).measure(0) is None


@pytest.mark.long
def test_an_engine_in_8_bits_is_told_from_a_wrong_one_by_what_changes(like_trained: Any) -> None:
    """Engine and trainer are further apart than the trainer's policies: no tolerance would do."""
    state = get_peft_model_state_dict(like_trained)
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}

    def policy_of(size: float) -> None:
        sized = {name: tensor * (size if "lora_B" in name else 0.1) for name, tensor in drawn.items()}
        set_peft_model_state_dict(like_trained, sized)

    policy_of(0.5)
    probe = received(PolicyProbe(ROWS, 1, like_trained, nullcontext).measure(0))
    with torch.no_grad():
        for name, weight in like_trained.named_parameters():
            if name.endswith("proj.base_layer.weight"):
                scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
                weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
    base, right, half = (served_by(like_trained, share) for share in (0.0, 1.0, 0.5))
    for served, refused in ((right, False), (base, True), (half, True)):
        proof = SwapProof(float("inf"), slack=0.3)
        proof.note_base(probe, base)
        assert ("does not compute this policy" in proof.verdict(probe, served).refusal) is refused


def test_the_library_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert quantization_config(config_of(tmp_path, tmp_path, None).model) is None
    with pytest.raises(ConfigError, match=r"nf4 needs bitsandbytes .*pip install '.\[quantization\]'"):
        quantization_config(config_of(tmp_path, tmp_path, "nf4").model)


@pytest.mark.long
@needs_library
def test_adamw_with_a_state_of_8_bits_goes_the_way_of_adamw_and_on_from_a_checkpoint(
    tmp_path: Path, one_layer_model: Path
) -> None:
    optim = "adamw_8bit"
    options = {"max_steps": 3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no"}
    groups = [rollout_group([[3, 4, 5], [6], [7, 8], [9]], prompt=[3, 4])] * 2

    def trainer(name: str) -> SlipstreamTrainer:
        config = run_config(tmp_path / name, one_layer_model, trainer=options | {"optim": name}, lora={"r": 64})
        found = slipstream_trainer(config, one_layer_model)
        found._batches = [TrainingBatch(step + 1, 1, step + 1, groups, 2) for step in range(3)]
        return found

    def weights(trained: SlipstreamTrainer) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in lora_parameters(trained)])

    ours, full = trainer(optim), trainer("adamw_torch")
    before = weights(ours)
    for each in (ours, full):
        each.train()
    cosine = torch.nn.functional.cosine_similarity(weights(ours) - before, weights(full) - before, dim=0)
    assert cosine > 0.99
    states = {
        value.dtype for state in ours.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    }
    assert torch.uint8 in states

    ours._save_optimizer_and_scheduler(str(tmp_path))
    other = trainer(optim)
    set_peft_model_state_dict(other.model, get_peft_model_state_dict(ours.model))
    other.create_optimizer_and_scheduler(3)
    other._load_optimizer_and_scheduler(str(tmp_path))
    after = weights(ours)
    for each in (ours, other):
        loss_and_gradients(each, each._prepare_inputs(each.recipe.tensors(groups)))
        each.optimizer.step()
    assert torch.equal(weights(other), weights(ours))
    assert not torch.equal(weights(ours), after)


def test_an_optimizer_of_the_library_asks_for_it_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for name in ("adamw_torch", "adafactor", "sgd"):
        check_optimizer(name, on_gpu=False)
    for name in ("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_8bit", "rmsprop_bnb_32bit", "galore_adamw_8bit"):
        with pytest.raises(ConfigError, match=f"trainer.optim: {name} needs bitsandbytes"):
            check_optimizer(name, on_gpu=True)
    with pytest.raises(
        ConfigError, match=r"paged_adamw_8bit moves its state .* does not; use adamw_8bit or adamw_torch"
    ):
        check_optimizer("paged_adamw_8bit", on_gpu=False)
