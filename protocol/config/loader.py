"""The loader of a run's configuration: a YAML file and `--set` overrides become a `RunConfig`.

Guarantee: every refusal names the file, the line, the key and the value, and for an unknown name the nearest valid one. All
problems of a file are reported at once. Paths are absolute (`protocol.config.places`).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from protocol.config.library_section import PEFT_DEFAULTS
from protocol.config.mistakes import collected
from protocol.config.places import make_absolute
from protocol.config.run import RunConfig
from protocol.config.source import Source, given_twice
from protocol.config.trainer_keys import TRL_DEFAULTS
from protocol.config.yaml_words import fault_of, in_words
from protocol.errors import ConfigError
from protocol.runtime.files import ignore_disk_full, staged
from protocol.runtime.scratch import private

RESOLVED_FILE = "resolved.yaml"
"""The name, in a run's folder, of the configuration with which rl-trainer was last started there."""


def load_config(path: str, overrides: list[str] | None = None) -> RunConfig:
    """Read `path`, applies overrides such as `pipeline.max_staleness=2`, and validates; raises `ConfigError`."""
    return strict(*read(path, overrides))


def load_values(values: Mapping[str, Any], overrides: list[str] | None = None) -> RunConfig:
    """Validate the content of a file that is given as a dictionary; raise `ConfigError`."""
    try:
        plain = json.loads(json.dumps(values, default=os.fspath))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"config: a value that YAML has no form for: {error}") from error
    return strict(*_sourced(plain, overrides, "config", None))


def read(path: str, overrides: list[str] | None = None) -> tuple[dict[str, Any], Source]:
    """Return the values of `path` under the overrides, and where they are from; raises `ConfigError` for a file that is none."""
    text = _read(path)
    try:
        loader = yaml.CSafeLoader(text)
        node = loader.get_single_node()
        twice = list(given_twice(node))
        values = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # PyYAML raises all four
        raise ConfigError(in_words(path, text, error)) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping with sections such as `model:` and `dataset:`")
    pairs = node.value if node is not None else []
    empty = {key.value for key, value in pairs if value.value == ""}  # `lora:` with nothing below it is no `lora: null`
    values, source = _sourced({key: value for key, value in values.items() if key not in empty}, overrides, path, node)
    source.twice = tuple(twice)
    return values, source


def _sourced(
    values: dict[str, Any], overrides: list[str] | None, path: str, node: Any
) -> tuple[dict[str, Any], Source]:
    """`node` has the lines of the values; None if they are of no file."""
    values = {key: value for key, value in values.items() if value is not None or key == "lora"}
    overridden = apply_overrides(values, overrides or [])
    make_absolute(values, path, set(overridden))
    return values, Source(path, node, overridden)


def strict(values: dict[str, Any], source: Source) -> RunConfig:
    """Validate, or raise `ConfigError` with all mistakes."""
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        source.refuse(collected(RunConfig, values).mistakes)
        raise ConfigError(f"{source.path}: {error}") from error
    source.refuse([])
    return config


def dump_config(config: RunConfig) -> str:
    """Return the resolved file, with the derived values as comments."""
    derived = {
        "completions per step": config.completions_per_step,
        "control endpoint": config.control_endpoint,
        "blob endpoint": config.blob_endpoint,
        "engine max_loras": config.lora_slots,
        "engine max_lora_rank": config.max_lora_rank,
    }
    body = yaml.dump(config.model_dump(mode="json"), Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    libraries = "# What engine, lora, trainer and sft leave out has the default of vLLM, PEFT or TRL, such as:\n"
    defaults = {
        "lora": (config.lora_section, PEFT_DEFAULTS if config.lora else {}),
        "trainer": (config.trainer, TRL_DEFAULTS),
    }
    left_out = {
        f"{name}.{key}": value
        for name, (section, known) in defaults.items()
        for key, value in known.items()
        if key not in section
    }
    return body + libraries + "".join(f"# {name}: {value}\n" for name, value in (left_out | derived).items())


def write_resolved(config: RunConfig) -> None:
    """Write `RESOLVED_FILE` to the run's folder, for its owner alone; not on a full disk."""
    file = Path(config.run_dir) / RESOLVED_FILE
    with ignore_disk_full(), staged(file) as partial, open(partial, "x", encoding="utf-8", opener=private) as stream:
        stream.write(dump_config(config))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Name one with --config, or let `slipstream init` write one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def apply_overrides(values: dict[str, Any], overrides: list[str]) -> dict[str, str]:
    """Change `values` and return the overrides by their keys; raise `ConfigError` for an override that is none. In the key of a
    list's part its number stands, from 0."""
    return {_apply(values, override): override for override in overrides}


def _apply(values: dict[str, Any], override: str) -> str:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set {override}: expected section.key=value, e.g. --set pipeline.max_staleness=2")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML: {fault_of(text, error).text}") from error
    *parents, leaf = key.split(".")
    place: Any = values
    for parent in parents:
        if isinstance(place, list):
            place = _part(place, parent, override)
        elif place.get(parent) is None:
            place[parent] = place = {}
        else:
            place = place[parent]
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {override}: `{parent}` is not a section")
    if isinstance(place, list):
        raise ConfigError(f"--set {override}: a part of a list has no name to set; name a key of it")
    place[leaf] = value
    return key


def _part(parts: list[Any], number: str, override: str) -> Any:
    if number.isdecimal() and int(number) < len(parts):
        return parts[int(number)]
    raise ConfigError(f"--set {override}: `{number}` is no part of the list, which has {len(parts)}, numbered from 0")
