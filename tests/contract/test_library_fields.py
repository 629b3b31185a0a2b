"""Fields that are read from the source of libraries, beside those of the classes themselves."""

import dataclasses
import enum
import importlib
import typing
from typing import Any

import pytest
import yaml

from protocol.config.library_fields import CLASSES, UNKNOWN, fields_of
from protocol.config.library_section import _type_hint
from protocol.config.library_values import by_type, converted

WRITTEN = (
    *(
        "5",
        "1e-4",
        "'1e-4'",
        "0.5",
        "3",
        "true",
        "false",
        "no",
        "null",
        "text",
        "auto",
        "[a, b]",
        "[1, 2]",
        "{a: 1}",
        "none",
    ),
    *("all", "steps", "cosine", "bfloat16", "'5'", "[]", "{}", "-1", "1.5"),
)
"""Values as they stand in a file."""


def fields_of_class(section: str) -> tuple[Any, dict[str, Any]]:
    module, name = CLASSES[section]
    owner = getattr(importlib.import_module(module), name)
    return owner, {field.name: field for field in dataclasses.fields(owner) if field.init}


@pytest.mark.parametrize("section", CLASSES)
def test_every_field_is_found_and_no_other(section: str) -> None:
    found = fields_of(section)
    assert found is not None
    assert found.keys() == fields_of_class(section)[1].keys()


@pytest.mark.parametrize("section", CLASSES)
def test_every_default_round_trips(section: str) -> None:
    """A hint that refuses what the library itself puts there would refuse users too."""
    found = fields_of(section)
    assert found is not None
    for name, field in fields_of_class(section)[1].items():
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if made is dataclasses.MISSING or not isinstance(
            made, str | int | float | bool | list | dict | None | enum.Enum
        ):
            continue
        value = made.value if isinstance(made, enum.Enum) else made
        assert converted(value, found[name]) == value, name
        assert found[name].default in (UNKNOWN, value), name


@pytest.mark.parametrize("section", CLASSES)
def test_what_the_class_s_own_types_take_is_taken(section: str) -> None:
    """But for texts that transformers makes members of: it takes no other."""
    owner, names = fields_of_class(section)
    found = fields_of(section)
    assert found is not None
    refused = []
    for name in names:
        hint = _type_hint(owner, name)
        if {str, enum.EnumMeta} <= {part if part is str else type(part) for part in typing.get_args(hint)}:
            continue
        for value in map(yaml.safe_load, WRITTEN):
            try:
                by_type(value, hint)
            except ValueError:
                continue
            try:
                converted(value, found[name])
            except ValueError as error:
                refused.append((name, value, str(error)))
    assert refused == []


@pytest.mark.parametrize(
    ("section", "key", "written", "taken"),
    [
        ("trainer", "scale_rewards", "false", False),
        ("trainer", "scale_rewards", "batch", "batch"),
        ("trainer", "save_strategy", "no", "no"),
        ("trainer", "eval_strategy", "no", "no"),
        ("trainer", "learning_rate", "1e-4", 1e-4),
        ("trainer", "save_steps", "0.1", 0.1),
        ("trainer", "logging_steps", "5", 5.0),
        ("trainer", "lr_scheduler_type", "cosine_with_min_lr", "cosine_with_min_lr"),
        ("trainer", "lr_scheduler_kwargs", "'{\"min_lr\": 0.1}'", '{"min_lr": 0.1}'),
        ("trainer", "report_to", "[wandb, tensorboard]", ["wandb", "tensorboard"]),
        ("trainer", "debug", "underflow_overflow", "underflow_overflow"),
        ("sft", "loss_type", "dft", "dft"),
        ("sft", "packing", "true", True),
        ("lora", "target_modules", "[q_proj]", ["q_proj"]),
        ("lora", "task_type", "CAUSAL_LM", "CAUSAL_LM"),
        ("lora", "init_lora_weights", "pissa", "pissa"),
        ("lora", "layers_to_transform", "3", 3),
        ("engine", "max_model_len", "4096", 4096),
        ("engine", "gpu_memory_utilization", "'0.9'", 0.9),
        ("engine", "compilation_config", "{level: 3}", {"level": 3}),
        ("engine", "attention_backend", "FLASH_ATTN", "FLASH_ATTN"),
        ("engine", "kv_cache_dtype", "fp8", "fp8"),
        ("engine", "quantization", "fp8", "fp8"),
    ],
)
def test_documented_values_are_taken(section: str, key: str, written: str, taken: object) -> None:
    found = fields_of(section)
    assert found is not None
    assert converted(yaml.safe_load(written), found[key]) == taken
