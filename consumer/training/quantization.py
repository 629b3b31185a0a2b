"""A frozen base of 4 or 8 bits per weight (`model.quantization`, bitsandbytes), and how its policies are proved.

Guarantee: LoRA weights are float32 whatever the base is. The probe of a swap is measured on the base in `model.dtype`, which is
the engine's, with the adapter that is trained: so its tolerance is as narrow as without quantization, and an engine that serves
the base, the version before or another scale is still found out. The importance ratio covers what the two bases differ by.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import BitsAndBytesConfig

from consumer.link.snapshots import Measurement, Probe
from consumer.training.vision_language import drop_towers, load_model, within_text_model
from protocol.config.data import ModelSection
from protocol.errors import ConfigError

_OF_BITSANDBYTES = ("adamw_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit", "galore_adamw_8bit")


def quantization_config(model: ModelSection) -> BitsAndBytesConfig | None:
    """What transformers loads the base with; None: as it is in its files.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if model.quantization is None:
        return None
    need_bitsandbytes(f"model.quantization: {model.quantization}")
    if model.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, model.dtype)
    )


def check_optimizer(name: str, *, on_gpu: bool) -> None:
    """transformers would ask for the library when the first step begins.

    Args:
        name: of `trainer.optim`.

    Raises:
        ConfigError: it is one of bitsandbytes, which is not installed, or pages its state where there is no GPU.
    """
    if name.startswith("paged_") and not on_gpu:
        raise ConfigError(
            f"trainer.optim: {name} moves its state between a GPU and the host, and on a CPU bitsandbytes does not; use "
            "adamw_8bit or adamw_torch"
        )
    if name.startswith("paged_") or "bnb" in name or name in _OF_BITSANDBYTES:
        need_bitsandbytes(f"trainer.optim: {name}")


def need_bitsandbytes(what: str) -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what} needs bitsandbytes ({error}): in Slipstream's checkout: pip install '.[quantization]'; or remove it"
        ) from error


def keep_as_it_trains(model: PeftModel) -> None:
    """TRL rounds the adapter of a quantized base to bfloat16, and bitsandbytes lays the base out anew, for bfloat16, in the first
    pass without gradients on some CPUs. Neither is wanted."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@dataclass(frozen=True, eq=False)
class UnquantizedProbe(Probe):
    """A probe whose `model` lies in host memory and takes over the adapter of `trained` when it is measured."""

    trained: PeftModel

    def measure(self, version: int) -> Measurement | None:
        if self.every and version % self.every == 0:
            set_peft_model_state_dict(self.model, get_peft_model_state_dict(self.trained))
        return super().measure(version)


def unquantized_probe(
    tokens: np.ndarray, every: int, model: ModelSection, folder: Path, lora: LoraConfig, trained: PeftModel
) -> Probe:
    """Loads the base once more, unless nothing is ever probed.

    Args:
        tokens: see `Probe`.
        folder: of the base.
        trained: on the quantized base.
    """
    if not every:
        return Probe(tokens, every, trained, nullcontext)
    dtype = getattr(torch, model.dtype)
    base = load_model(folder, dtype=dtype, trust_remote_code=model.trust_remote_code)
    like_trained = get_peft_model(base, within_text_model(lora, folder))
    drop_towers(base)
    return UnquantizedProbe(tokens, every, like_trained, nullcontext, trained)
