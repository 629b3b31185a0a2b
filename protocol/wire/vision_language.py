"""Checkpoints of vision-language models, of which a run trains and serves the text model alone.

Guarantee: both daemons take the same architectures, and agree on which modules are of the text model. A checkpoint that sees or
hears and is not one of these is refused.
"""

from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigError
from protocol.wire.digests import json_object, unreadable_is_configuration

ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""transformers calls the text model of all of them `model.language_model`, and its head `lm_head`."""

OUTSIDE_TEXT_MODEL = r"(?!model\.language_model\.|lm_head$).*"
"""Matches the full name of every other module."""

_TOWERS = {"visual", "vision_tower", "multi_modal_projector"}  # parts of names, in files of every age
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id")


class VisionLanguage(NamedTuple):
    """What a run needs to know of such a checkpoint.

    Attributes:
        placeholders: tokens in whose place images or videos are put.
    """

    architecture: str
    placeholders: frozenset[int]


def placeholders_of(folder: Path) -> frozenset[int]:
    """Of the model in this folder. Raises as `vision_language`."""
    seen = vision_language(folder)
    return seen.placeholders if seen is not None else frozenset()


@unreadable_is_configuration()
def vision_language(folder: Path) -> VisionLanguage | None:
    """What the model in this folder is beside a text model; None if nothing.

    Raises:
        ConfigError: it sees or hears, and is none of `ARCHITECTURES`.
    """
    config = json_object(folder / "config.json")
    if "vision_config" not in config and "audio_config" not in config:
        return None
    named = config.get("architectures") or ["of no architecture"]
    if named[0] not in ARCHITECTURES:
        raise ConfigError(
            f"model.path: {folder} is a multimodal model ({named[0]}); a run can train the text model of "
            f"{', '.join(ARCHITECTURES)}. Choose one of these, or a model of text alone"
        )
    found = (config.get(key) for key in _PLACEHOLDERS)
    return VisionLanguage(named[0], frozenset(token for token in found if isinstance(token, int)))


def is_of_text_model(weight: str) -> bool:
    """Whether a weight of this name in a checkpoint's file is not one of what sees images."""
    return _TOWERS.isdisjoint(weight.split("."))
