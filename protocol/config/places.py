"""The paths of a configuration file.

Guarantee: once a file is loaded, each path that it names is absolute, or begins in `folder`. Paths of the file begin in its own
folder, and those of the command line in the working directory. A name of the hub stays as it is.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError

ROW_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of the files that a dataset may be, perhaps with .gz behind."""


def row_file_ending(name: str) -> str | None:
    """Return which of `ROW_FILES` a name, or a pattern of names, ends in."""
    return next((ending for ending in ROW_FILES if name.removesuffix(".gz").endswith(ending)), None)


def is_local(model: str, folder: Path) -> bool:
    """Return whether the name of a model is that of a folder, there or not, and none of the hub. Relative ones begin in
    `folder`."""
    return model.startswith((".", "~", "/")) or os.path.isdir(folder / model)


def _path(value: str, folder: Path) -> str:
    return os.path.abspath(folder / os.path.expanduser(value))


def _model(value: str, folder: Path) -> str:
    return _path(value, folder) if is_local(value, folder) else value


def _rows(value: str, folder: Path) -> str:
    return _path(value, folder) if row_file_ending(value) else _model(value, folder)


def _program(value: str, folder: Path) -> str:
    return _path(value, folder) if "/" in value else value


def _code(value: str, folder: Path) -> str:
    file, _, name = value.rpartition(":")
    return f"{_path(file, folder)}:{name}" if file.endswith(".py") and name.isidentifier() else value


_DATASETS = ("dataset", "dataset.sources.*", "evaluation.dataset", "evaluation.dataset.sources.*")
_KEYS: dict[str, Callable[[str, Path], str]] = {
    "run_dir": _path,
    "transport.keys": _path,
    "serve.api_key_file": _path,
    "engine_server.adapter_dir": _path,
    "engine_server.key_file": _path,
    "engine_server.ca_file": _path,
    "teachers.*.key_file": _path,
    "teachers.*.ca_file": _path,
    "model.path": _model,
    "lora.init_from": _model,
    "rewards.functions.*.model": _model,
    "rewards.functions.*.options.model": _model,
    "rewards.functions.*.function": _code,
    "rewards.functions.*.options.python": _program,
    "environment": _code,
    "environment.factory": _code,
    "environment.options.python": _program,
    "environments.*.factory": _code,
    "environments.*.options.python": _program,
    "environment.options.key_file": _path,
    "environment.options.ca_file": _path,
    "environments.*.options.key_file": _path,
    "environments.*.options.ca_file": _path,
    **{f"{dataset}.path": _rows for dataset in _DATASETS},
    **{f"{dataset}.{key}": _code for dataset in _DATASETS for key in ("filter", "transform")},
}


def make_absolute(values: dict[str, Any], file: str, overridden: set[str]) -> None:
    """Set `folder` and each path in `values`, which may be wrong in every other way.

    Args:
        overridden: the keys that the command line gave.
    """
    here, folder = Path.cwd(), Path(file).absolute().parent
    if isinstance(given := values.get("folder", "."), str):
        values["folder"] = _path(given, here if "folder" in overridden else folder)
        folder = Path(values["folder"])
    for pattern, absolute in _KEYS.items():
        for place, key, name in _found(values, pattern.split("."), ""):
            value, is_typed = place[key], any(name == one or name.startswith(f"{one}.") for one in overridden)
            if isinstance(value, str) and value:
                place[key] = absolute(value, here if is_typed else folder)


@contextmanager
def working_in(folder: str) -> Iterator[None]:
    """Work in the folder of a configuration; `ConfigError` if it cannot be entered."""
    before = os.getcwd()
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(f"folder: {folder}: {error.strerror}; name another one") from error
    try:
        yield
    finally:
        os.chdir(before)


def _found(values: Any, pattern: list[str], above: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield the container, the key or number, and the full name of each value that fits."""
    key, *rest = pattern
    if isinstance(values, list) and key == "*":
        keys: list[Any] = [*range(len(values))]
    else:
        keys = [key] if isinstance(values, dict) and key in values else []
    for one in keys:
        name = f"{above}.{one}".lstrip(".")
        if rest:
            yield from _found(values[one], rest, name)
        else:
            yield values, one, name
