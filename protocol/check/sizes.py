"""Lengths and names that follow from a model's configuration and its weights' headers.

Guarantee: only what cannot work is a mistake: a length that no completion fits in, modules that the model does not have.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.config.mistakes import Mistake
from protocol.config.run import RunConfig
from protocol.config.section import nearest
from protocol.errors import ConfigError
from protocol.gpu.weights import weights_of
from protocol.wire.model_folder import json_object

_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def size_problems(config: RunConfig, folder: Path | None) -> Iterator[Mistake]:
    """Yield lengths that do not fit each other. Without `folder` the model's own are unknown."""
    longest = None if folder is None else _longest(folder)
    asked, completion = config.engine.get("max_model_len"), config.sampling.max_completion_length
    asked = int(asked) if isinstance(asked, int | float) or (isinstance(asked, str) and asked.isdecimal()) else None
    if asked is not None and longest is not None and asked > longest and os.environ.get(_LONGER) != "1":
        yield Mistake(
            ("engine", "max_model_len"), f"{asked} is more than the {longest} positions of the model; lower it"
        )
    longest = None if asked is not None and os.environ.get(_LONGER) == "1" else longest
    limits = {"engine.max_model_len": asked, "the positions of the model": longest}
    rooms = [(length, name) for name, length in limits.items() if length is not None and length > 0]
    if not rooms:
        return
    room, name = min(rooms)
    if completion >= room:
        yield Mistake(
            ("sampling", "max_completion_length"),
            f"{completion} leaves no room for a prompt in {name}: {room}; lower one or raise the other",
        )
        return
    held_out = config.evaluation.dataset if config.evaluation is not None else None
    for place, section in (("dataset", config.dataset), ("evaluation.dataset", held_out)):
        limit = section.max_prompt_tokens if section is not None else None
        if limit is not None and limit + completion > room:
            yield Mistake(
                (*place.split("."), "max_prompt_tokens"),
                f"{limit} and sampling.max_completion_length={completion} are more than {name}: {room}; lower it to "
                f"{room - completion}, or change one of the others",
            )


def _longest(folder: Path) -> int | None:
    """The positions of the model; None where they are not said, or stretched."""
    try:
        config = json_object(folder / "config.json")
    except (ConfigError, OSError):
        return None
    config = config.get("text_config") or config
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kinds = {scaling.get("rope_type") or scaling.get("type")} if isinstance(scaling, dict) else {"?"}
    if not kinds <= {None, "default", "mrope"} or any(
        isinstance(one, dict) for one in getattr(scaling, "values", list)()
    ):
        return None
    limits = (config.get(key) for key in _LIMITS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def module_problems(lora: dict[str, Any], folder: Path) -> Iterator[Mistake]:
    """Yield target modules that no weight of the model belongs to."""
    targets, place = lora.get("target_modules"), ("lora", "target_modules")
    try:
        modules = [weight.module for weight in weights_of(folder)]
    except (ConfigError, OSError, KeyError, TypeError):
        return
    ends = sorted({module.rpartition(".")[2] for module in modules})
    if not modules or targets in (None, "all-linear"):
        return
    if isinstance(targets, list):
        found = [name for name in targets if any(f".{module}".endswith(f".{name}") for module in modules)]
        if not found and "lm_head" not in targets and all(isinstance(name, str) for name in targets):
            hint = "; ".join(filter(None, (nearest(name, ends, "") for name in targets)))
            yield Mistake(place, f"the model has no module {', '.join(targets)}; {hint or 'it has ' + ', '.join(ends)}")
    elif isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            yield Mistake(place, f"{targets!r} is no regular expression: {error}; a list has names of modules")
            return
        names = [form for one in modules for form in (one, f"model.{one}", f"transformer.{one}", one.partition(".")[2])]
        if not any(map(pattern.fullmatch, names)):
            fix = f"write [{targets}]" if targets in ends else "a list has names of modules"
            yield Mistake(place, f"a text is a regular expression of whole names, and {targets!r} fits none; {fix}")
