"""An adapter that vLLM cannot serve, merged into the weights of its base one layer at a time.

Guarantee: with the merged weights the base alone computes what base and adapter compute together. They are computed in float32 or
wider, and before training they are those of the checkpoint, bit for bit. What cannot be merged so is refused by its name.

An adapter A (r, in), B (out, r) of scaling s makes of the weight W (out, in) of a layer

    M = W + s B A                   LoRA
    M = W + s (B A - B0 A0)         PiSSA, OLoRA: they begin with B0 A0, and PEFT takes s B0 A0 out of W
    M' = m / |M| M                  DoRA, in which m and |M| are of rows

and each module of `modules_to_save` has other weights in place of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, transpose
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from protocol.config.lora_section import changes_base
from protocol.errors import ConfigError

BEGINNING_FILE = "adapter_beginning.safetensors"
"""The part of the base that PEFT took out, beside an adapter. Another device would find other singular vectors."""

_ADAPTER = "default"


class Beginning(NamedTuple):
    """The weight of a layer as the checkpoint has it, in host memory, and the part of it with which its adapter began."""

    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


class PublishedWeight(NamedTuple):
    """A tensor of the checkpoint that training changes: what it was, and what it is.

    Attributes:
        merged: whether `now` is computed, in float32 or wider.
    """

    name: str
    shape: torch.Size
    base: Callable[[], torch.Tensor]
    now: Callable[[], torch.Tensor]
    merged: bool = False


def adapt(base: Any, lora: LoraConfig) -> PeftModel:
    """Give a base an adapter to be merged. What trains is float32 or wider.

    Raises:
        ConfigError: a module cannot be merged.
    """
    begins = changes_base({"init_lora_weights": lora.init_lora_weights})
    names = Counter(map(id, dict(base.named_parameters(remove_duplicate=False)).values()))
    shared = {name for name, each in base.named_parameters(remove_duplicate=False) if names[id(each)] > 1}
    weights = {name: each.detach().to("cpu", copy=True) for name, each in base.named_parameters() if begins}
    model = get_peft_model(base, lora)
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            _check_layer(name, module)
            if begins:
                parts = (part[_ADAPTER].weight.detach().clone() for part in (module.lora_A, module.lora_B))
                _begin(module, Beginning(weights[f"{name}.weight"], *parts))
            if _ADAPTER in module.lora_magnitude_vector:  # PEFT has rounded it to the type of the base
                module.lora_magnitude_vector[_ADAPTER].weight.data = _norms(module, _updated(module))
    widen_saved_modules(model)
    for weight in merged_weights(model):
        if weight.name in shared:
            raise ConfigError(
                f"lora: {weight.name} is one tensor with another weight of this model (tie_word_embeddings), which would change "
                f"with it; take {weight.name.rpartition('.')[0]} out of lora.modules_to_save and lora.target_modules"
            )
    return model


def widen_saved_modules(model: PeftModel) -> None:
    """Let the weights of `modules_to_save` train in float32 at least; PEFT keeps them as the base has them."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for parameter in module.modules_to_save.parameters():
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def save_beginning(model: Any, folder: Path) -> None:
    """Write beside an adapter how it began, if that was with a part of the base."""
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in _begun(model):
        tensors |= {f"{name}.a": layer.begun.a.cpu().contiguous(), f"{name}.b": layer.begun.b.cpu().contiguous()}
    if tensors:
        save_file(tensors, folder / BEGINNING_FILE)


def load_beginning(model: Any, folder: Path) -> None:
    """Let an adapter that has not been trained begin as the one that was saved in a folder.

    Raises:
        ConfigError: the file is missing, or of another adapter.
    """
    try:
        tensors = load_file(folder / BEGINNING_FILE)
        for name, layer in _begun(model):
            a, b = (part[_ADAPTER].weight for part in (layer.lora_A, layer.lora_B))
            a.data.copy_(tensors[f"{name}.a"])
            b.data.copy_(tensors[f"{name}.b"])
            _begin(layer, Beginning(layer.begun.weight, a.detach().clone(), b.detach().clone()))
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{folder / BEGINNING_FILE} does not say how this adapter began ({error!r}); give the configuration that it was "
            "trained with, and copy folders of adapters whole"
        ) from error


def _begun(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "begun"))


def merged_weights(model: PeftModel) -> Iterator[PublishedWeight]:
    """Yield the weights that an adapter changes, by their names in the checkpoint."""
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, Linear):
            shape, base = module.get_base_layer().weight.shape, partial(base_weight, module)
            yield PublishedWeight(f"{name}.weight", shape, base, partial(merged_weight, module), merged=True)
        elif isinstance(module, ModulesToSaveWrapper):
            before = dict(module.original_module.named_parameters())
            for last, parameter in module.modules_to_save[_ADAPTER].named_parameters():
                of_base, now = before[last], parameter
                yield PublishedWeight(f"{name}.{last}", now.shape, partial(_same, of_base), partial(_same, now))


def base_weight(layer: Linear) -> torch.Tensor:
    """Return the weight of a layer as the checkpoint has it."""
    weight: torch.Tensor = layer.get_base_layer().weight
    begun: Beginning | None = getattr(layer, "begun", None)
    return weight if begun is None else begun.weight.to(weight.device)


def merged_weight(layer: Linear) -> torch.Tensor:
    """Return the weight with which the base of a layer computes what layer and adapter compute, in float32 or wider."""
    with torch.no_grad(), torch.autocast(layer.get_base_layer().weight.device.type, enabled=False):
        merged = _updated(layer)
        if _ADAPTER in layer.lora_magnitude_vector:
            factors = layer.lora_magnitude_vector[_ADAPTER].weight / _norms(layer, merged)
            merged = merged * transpose(factors[:, None], layer.fan_in_fan_out)
        return merged


def _updated(layer: Linear) -> torch.Tensor:
    weight, begun = base_weight(layer), getattr(layer, "begun", None)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    update = _product(layer, layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight)
    if begun is not None:
        update = update - _product(layer, begun.a.to(update), begun.b.to(update))
    return torch.where(update == 0, weight, weight + update)  # -0 + 0 has other bits than -0


def _product(layer: Linear, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = transpose(b @ a, layer.fan_in_fan_out) * layer.scaling[_ADAPTER]
    return product


def _norms(layer: Linear, weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.norm(transpose(weight, layer.fan_in_fan_out), dim=1)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _check_layer(name: str, layer: BaseTunerLayer) -> None:
    base = layer.get_base_layer()
    variant = getattr(layer, "lora_magnitude_vector", {})
    is_dora = _ADAPTER in variant and type(variant[_ADAPTER]) is DoraLinearLayer
    if not isinstance(layer, Linear) or base.weight.dim() != 2 or (layer.lora_variant and not is_dora):
        raise ConfigError(
            f"lora.target_modules: {name} is a {type(base).__name__} with a {type(layer).__name__}, which the trainer cannot "
            "merge exactly; name linear layers alone"
        )


def _begin(layer: Linear, begun: Beginning) -> None:
    """Note how the adapter of a layer begins, and take exactly that out of the base. PEFT has rounded it afterwards."""
    layer.begun = begun
    of_base, weight = layer.get_base_layer().weight, begun.weight
    wide = weight.to(begun.a.device, torch.promote_types(weight.dtype, torch.float32))
    of_base.data = (wide - _product(layer, begun.a, begun.b)).to(of_base)
