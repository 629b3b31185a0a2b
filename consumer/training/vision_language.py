"""The text model of a vision-language checkpoint: how it is loaded, adapted and kept.

Guarantee: an adapter has the names that its modules have in the whole checkpoint, so transformers, PEFT and vLLM take it as it
is. Nothing that sees images is adapted, or stays in memory. A checkpoint of text alone is what it always was.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from consumer.ranks.sharding import text_model
from protocol.wire.model_folder import OUTSIDE_TEXT_MODEL, vision_language


def load_model(folder: Path, **options: Any) -> Any:
    """The whole checkpoint, by `from_pretrained` with these options."""
    automatic = AutoModelForCausalLM if vision_language(folder) is None else AutoModelForImageTextToText
    return automatic.from_pretrained(folder, **options)


def within_text_model(lora: LoraConfig, folder: Path) -> LoraConfig:
    """The same, for the text model of the checkpoint in this folder alone. PEFT takes modules by parts of their names, and towers
    have `q_proj` too."""
    if vision_language(folder) is None:
        return lora
    excluded = lora.exclude_modules or ()
    if not isinstance(excluded, str):
        excluded = "|".join(rf"(?:.*\.)?{re.escape(name)}" for name in sorted(excluded))
    outside = f"{OUTSIDE_TEXT_MODEL}|{excluded}" if excluded else OUTSIDE_TEXT_MODEL
    return replace(lora, exclude_modules=outside)


def drop_towers(model: Any) -> None:
    """Frees what of a vision-language model is not its text model, once it has its adapter."""
    whole, text = model.base_model, text_model(model)
    for name, module in list(whole.named_children()):
        if whole is not text and module is not text:
            setattr(whole, name, None)
