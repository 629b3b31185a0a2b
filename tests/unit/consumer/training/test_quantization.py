"""A base in 4 or 8 bits, by the real bitsandbytes: what is trained, and what a swap is proved with."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from consumer.publishing.snapshots import NUM_TOKENS, Probe
from consumer.training.quantization import quantization_config, unquantized_probe
from consumer.training.trainer import SlipstreamTrainer
from consumer.training.trl_arguments import build_lora
from producer.interfaces import Probe as ReceivedProbe
from producer.policies.verification import SwapProof
from protocol.config.run import RunConfig
from protocol.config.sections.swap import TOLERANCES
from protocol.errors import ConfigError
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import lora_parameters, loss_and_gradients, slipstream_trainer

TOKENS = torch.arange(3, 3 + NUM_TOKENS).int().numpy()
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


@needs_library
@pytest.mark.parametrize("quantization", FORMATS)
def test_a_swap_is_proved_as_narrowly_as_without_quantization(
    tmp_path: Path, one_layer_model: Path, like_trained: Any, quantization: str
) -> None:
    """Engine: the base in float32. The versions are a trained step apart; the format moves log-probs by far more than the
    tolerance, so a probe on the quantized base would prove nothing."""
    trainer = trainer_of(tmp_path, one_layer_model, quantization)
    trained, config = trainer._peft_model, run_config(tmp_path, one_layer_model)
    model = config.model
    probe = unquantized_probe(TOKENS, 1, model, one_layer_model, build_lora(config), trained)
    versions, measured = [], []
    for version in range(2):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in lora_parameters(trainer):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        versions.append({name: tensor.clone() for name, tensor in get_peft_model_state_dict(trained).items()})
        measurement = probe.measure(version)
        assert measurement is not None
        measured.append(ReceivedProbe(tuple(TOKENS.tolist()), tuple(measurement.logprobs.tolist())))
    on_quantized = Probe(TOKENS, 1, trained, trainer.accelerator.autocast).measure(1)
    assert on_quantized is not None

    def served(state: dict[str, torch.Tensor], scale: float = 1.0) -> list[float]:
        scaled = {name: tensor * (scale if "lora_B" in name else 1.0) for name, tensor in state.items()}
        set_peft_model_state_dict(like_trained, scaled)
        found = Probe(TOKENS, 1, like_trained, trainer.accelerator.autocast).measure(0)
        assert found is not None
        return [float(value) for value in found.logprobs]

    tolerance = TOLERANCES["float32"]
    assert SwapProof(tolerance).refusal(measured[1], served(versions[1])) == ""
    assert float((on_quantized.logprobs - torch.tensor(served(versions[1]))).abs().max()) > tolerance
    for wrong in (served(versions[1], 0.0), served(versions[0]), served(versions[1], 0.9)):
        assert "does not compute this policy" in SwapProof(tolerance).refusal(measured[1], wrong)
    assert probe.measure(1) is not None
    assert unquantized_probe(TOKENS, 0, model, one_layer_model, build_lora(config), trained).measure(0) is None


def test_the_library_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert quantization_config(config_of(tmp_path, tmp_path, None).model) is None
    with pytest.raises(ConfigError, match=r"nf4 needs bitsandbytes \(.*\): pip install 'slipstream\[quantization\]'"):
        quantization_config(config_of(tmp_path, tmp_path, "nf4").model)
