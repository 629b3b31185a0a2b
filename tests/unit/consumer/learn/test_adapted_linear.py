"""The pass through a LoRA layer: PEFT's numbers, and what is left to PEFT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear

from consumer.learn import adapted_linear
from consumer.learn.adapted_linear import AdaptedLinear, AdaptedProduct, use_adapted_products
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.trl_reference import slipstream_trainer

Changes = Callable[[Any], None]


def model_of(*, bias: bool = True, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A base of two layers with an adapter of scaling 4, none of whose weights is zero."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(5, 7, bias=bias), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=bias))
    lora = {"r": 2, "lora_alpha": 8, "target_modules": ["0", "2"]} | options
    model = get_peft_model(base.to(dtype), LoraConfig(**lora), autocast_adapter_dtype=False)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw).to(dtype)
    return model


def passed(model: Any, *, shape: tuple[int, ...] = (2, 4, 5), input_trains: bool = True) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of all that is trained."""
    dtype = next(model.parameters()).dtype
    x = torch.linspace(-1, 1, 5 * shape[-2] * (shape[0] if len(shape) > 2 else 1)).view(shape).to(dtype)
    x.requires_grad_(input_trains)
    out = model(x)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = [x, *trained] if input_trains else trained
    slopes = torch.autograd.grad(out.pow(3).sum(), wanted, allow_unused=True)
    return [out.detach(), *(slope for slope in slopes if slope is not None)]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scaling of each product made by ours, in order."""
    made: list[float] = []

    class Watched:
        @staticmethod
        def apply(*inputs: Any) -> torch.Tensor:
            made.append(inputs[-1])
            result: torch.Tensor = AdaptedProduct.apply(*inputs)
            return result

    monkeypatch.setattr(adapted_linear, "AdaptedProduct", Watched)
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 4, 5), (4, 5), (1, 1, 5)])
@pytest.mark.parametrize("input_trains", [True, False])
def test_outputs_and_gradients_are_those_of_peft(
    products: list[float], bias: bool, shape: tuple[int, ...], input_trains: bool
) -> None:
    model = model_of(bias=bias)
    expected = passed(model, shape=shape, input_trains=input_trains)
    use_adapted_products(model)
    found = passed(model, shape=shape, input_trains=input_trains)
    assert products == [4.0, 4.0]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_a_rank_stabilized_scaling_is_that_of_peft(products: list[float]) -> None:
    model = model_of(use_rslora=True)
    expected = passed(model)
    use_adapted_products(model)
    torch.testing.assert_close(passed(model), expected, atol=1e-11, rtol=1e-11)
    assert products == [pytest.approx(8 / 2**0.5)] * 2


def test_autocast_multiplies_in_its_type_and_gives_gradients_in_that_of_the_adapter(products: list[float]) -> None:
    model = model_of(dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(passed(model))
        use_adapted_products(model)
    by_peft, ours = found
    assert len(products) == 2
    assert [one.dtype for one in ours] == [one.dtype for one in by_peft]
    for one, other in zip(ours, by_peft, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.1, atol=0.05 * float(other.abs().max()))


def adds_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.lora_dropout["default"] = torch.nn.Dropout(0.5)


def disables_adapters(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def merges(model: Any) -> None:
    model.merge_adapter()


def trains_the_base(model: Any) -> None:
    model.requires_grad_(True)


def mixes_types(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()


@pytest.mark.parametrize("change", [adds_dropout, disables_adapters, merges, trains_the_base, mixes_types])
def test_what_is_more_than_that_is_left_to_peft(products: list[float], change: Changes) -> None:
    model = model_of()
    change(model)
    found = []
    for _ in range(2):
        torch.manual_seed(2)
        x = torch.linspace(-1, 1, 10).view(2, 5).double()
        found.append(model(x))
        use_adapted_products(model)
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)
    assert products == []


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_variants_and_biases_of_lora_are_left_to_peft(products: list[float], options: dict[str, Any]) -> None:
    model = model_of(**options)
    expected = passed(model)
    use_adapted_products(model)
    torch.testing.assert_close(passed(model), expected, atol=0, rtol=0)
    assert products == []


def test_a_base_layer_of_another_kind_is_left_to_peft(products: list[float]) -> None:
    """As those of quantized bases are, some of which derive from torch's."""

    class Quantized(torch.nn.Linear):
        pass

    model = get_peft_model(torch.nn.Sequential(Quantized(5, 7)), LoraConfig(r=2, target_modules=["0"]))
    use_adapted_products(model)
    model(torch.ones(1, 5))
    assert products == []


def test_dropout_that_is_switched_off_for_an_evaluation_is_none(products: list[float]) -> None:
    model = model_of(lora_dropout=0.5).eval()
    use_adapted_products(model)
    passed(model)
    assert len(products) == 2


def test_two_adapters_at_once_are_left_to_peft(products: list[float]) -> None:
    model = model_of()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=8, target_modules=["0", "2"]))
    model.base_model.set_adapter(["default", "other"])
    use_adapted_products(model)
    model(torch.ones(1, 5).double())
    assert products == []


def test_names_and_weights_of_the_model_stay() -> None:
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    use_adapted_products(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert len([module for module in model.modules() if isinstance(module, AdaptedLinear)]) == 2


def test_the_trainer_uses_it_for_every_adapted_layer(tmp_path: Path, one_layer_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, one_layer_model), one_layer_model)
    layers = [module for module in trainer.model.modules() if isinstance(module, Linear)]
    assert layers
    assert all(type(layer) is AdaptedLinear for layer in layers)
