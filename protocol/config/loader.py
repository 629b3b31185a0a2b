"""The loader of a run's configuration: a YAML file and `--set` overrides become a `RunConfig`.

Guarantee: every refusal names the file, the line, the key and the value, and for an unknown name the nearest valid one. All
problems of a file are reported at once. Paths are absolute (`protocol.config.places`).
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from protocol.config.library_section import PEFT_DEFAULTS
from protocol.config.places import make_absolute
from protocol.config.run import RunConfig
from protocol.config.section import expected, is_compound, is_section, nearest
from protocol.config.trainer_keys import TRL_DEFAULTS
from protocol.errors import ConfigError
from protocol.runtime.files import ignore_disk_full, staged
from protocol.runtime.scratch import private

RESOLVED_FILE = "resolved.yaml"
"""The name, in a run's folder, of the configuration with which rl-trainer was last started there."""


def load_config(path: str, overrides: list[str] | None = None) -> RunConfig:
    """Read `path`, applies overrides such as `pipeline.max_staleness=2`, and validates; raises `ConfigError`."""
    text = _read(path)
    try:
        loader = yaml.CSafeLoader(text)
        node = loader.get_single_node()
        _refuse_duplicate_keys(path, node)
        values = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # PyYAML raises all four
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping with sections such as `model:` and `dataset:`")
    pairs = node.value if node is not None else []
    empty = {key.value for key, value in pairs if value.value == ""}  # `lora:` with nothing below it is no `lora: null`
    return _checked({key: value for key, value in values.items() if key not in empty}, overrides, path, node)


def load_values(values: Mapping[str, Any], overrides: list[str] | None = None) -> RunConfig:
    """Validate the content of a file that is given as a dictionary; raise `ConfigError`."""
    try:
        plain = json.loads(json.dumps(values, default=os.fspath))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"config: a value that YAML has no form for: {error}") from error
    return _checked(plain, overrides, "config", None)


def _checked(values: dict[str, Any], overrides: list[str] | None, path: str, node: Any) -> RunConfig:
    """`node` has the lines of the values; None if they are of no file."""
    values = {key: value for key, value in values.items() if value is not None or key == "lora"}
    overridden = apply_overrides(values, overrides or [])
    make_absolute(values, path, overridden)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(problem, path, node, overridden) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


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
        raise ConfigError(f"{path}: no such file. Give one with --config; examples/ has some to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _refuse_duplicate_keys(path: str, node: Any) -> None:
    """YAML would silently keep the last of two equal keys."""
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines and key.value != "<<":
                raise ConfigError(f"{path}:{line}: `{key.value}` is given twice, first in line {lines[key.value]}")
            lines[str(key.value)] = line
            _refuse_duplicate_keys(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicate_keys(path, item)


def apply_overrides(values: dict[str, Any], overrides: list[str]) -> set[str]:
    """Change `values` and returns the keys; raises `ConfigError` for an override that is none. In the key of a list's part its
    number stands, from 0."""
    return {_apply(values, override) for override in overrides}


def _apply(values: dict[str, Any], override: str) -> str:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set {override}: expected section.key=value, e.g. --set pipeline.max_staleness=2")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML: {error}") from error
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


def _explain(problem: Any, path: str, node: Any, overridden: set[str]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    location = [part for part in problem["loc"] if part != "[key]"]
    depth, field = _compound_field(location)
    if field is not None:  # one line for all of its parts
        del location[depth:]
        if problem["type"] != "value_error":
            message = expected(field.annotation, field.metadata)
    if named := re.match(r"`(\w+)[`:]", message):  # a key inside a section that belongs to a library
        location.append(named[1])
    unknown = problem["type"] == "extra_forbidden"
    where = _where(location, path, node, overridden, unknown)
    if unknown:
        valid = _valid_names(location[:-1])
        return (
            f"{where}: unknown key `{location[-1]}`; {nearest(str(location[-1]), valid, 'valid: ' + ', '.join(valid))}"
        )
    if problem["type"] == "missing" and field is None:
        return f"{where}: required, but not given"
    shown = problem["input"]
    if isinstance(shown, (str, int, float, bool)) or shown is None or (field is not None and len(str(shown)) < 80):
        return f"{where}: {message} (got {shown!r})"
    return f"{where}: {message}"


def _where(location: list[Any], path: str, node: Any, overridden: set[str], unknown: bool = False) -> str:
    """The override that gave the value, or its line in the file. For an unknown section, an override of a key in it counts."""
    key = ".".join(str(part) for part in location)
    given_by_override = any(
        key == name or key.startswith(f"{name}.") or (unknown and name.startswith(f"{key}.")) for name in overridden
    )
    if given_by_override:
        return f"--set {key}"
    return (f"{path}: {key}" if node is None else f"{path}:{_line(node, location)}: {key}").rstrip(": ")


def _line(node: Any, location: list[Any]) -> int:
    """The line, from 1, of the deepest part of `location` that the file has."""
    line = 1
    for part in location:
        places = []
        if isinstance(node, yaml.MappingNode):
            places = [place for place in node.value if place[0].value == str(part)]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            places = [(item, item) for item in node.value[part : part + 1]]
        if not places:
            break
        line, node = places[0][0].start_mark.line + 1, places[0][1]
    return line


def _compound_field(location: list[Any]) -> tuple[int, FieldInfo | None]:
    """The field on the way to `location` whose parts pydantic reports one by one, under names of its own below the
    field's; and how deep it is."""
    model: Any = RunConfig
    for depth, part in enumerate(location, start=1):
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if model else None
        if field is None:
            break
        if is_compound(field.annotation):
            return depth, field
        model = _section(field.annotation)
    return len(location), None


def _valid_names(location: list[Any]) -> list[str]:
    model: Any = RunConfig
    for part in location:
        if not isinstance(part, int):
            model = _section(model.model_fields[part].annotation)
    return list(model.model_fields)


def _section(annotation: Any) -> Any:
    return next((part for part in (annotation, *get_args(annotation)) if is_section(part)), None)
