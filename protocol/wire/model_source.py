"""The place of a base model: a folder of this host, or the snapshot of a hub name.

Guarantee: a folder that is returned has been looked at (`protocol.wire.model_check`).
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from protocol.errors import ConfigError
from protocol.runtime.health import Health
from protocol.wire.hub import snapshot
from protocol.wire.model_check import base_problems
from protocol.wire.model_folder import unreadable_is_configuration

_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_LONGEST_DOWNLOAD_S = 24 * 3600.0


class ModelSection(Protocol):
    """The section `model`."""

    @property
    def path(self) -> str: ...

    @property
    def revision(self) -> str | None: ...

    @property
    def trust_remote_code(self) -> bool: ...


@unreadable_is_configuration()
def resolve_model(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """The local folder of a model: `path` itself, or the snapshot of a hub name (downloaded if need be, with its Python files
    if they are trusted). `ConfigError` if it is neither."""
    folder = Path(path)
    if folder.is_dir():
        return checked(folder, base_problems(folder, trust_remote_code=trust_remote_code))
    if folder.is_file():
        raise ConfigError(f"model.path: {path} is a file; name the folder of a model of transformers")
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path: {path} does not exist")
    found = snapshot(path, revision, (*_PATTERNS, *(["*.py"] if trust_remote_code else [])), "model.path")
    return checked(found, base_problems(found, trust_remote_code=trust_remote_code))


def look_at_model(model: ModelSection) -> None:
    """Raise ConfigError if the base model is a folder of this host whose files have a fault. It takes milliseconds."""
    if Path(model.path).is_dir():
        resolve_model(model.path, trust_remote_code=model.trust_remote_code)


def fetch_model(model: ModelSection, health: Health) -> None:
    """Fetch a base model of the hub, as a stage of a daemon's start of its own. Raise ConfigError if it cannot be had."""
    if not Path(model.path).is_dir():
        with health.starting(f"downloading {model.path}", _LONGEST_DOWNLOAD_S):
            resolve_model(model.path, model.revision, trust_remote_code=model.trust_remote_code)


def folder_on_disk(path: str, revision: str | None) -> Path:
    """Return the folder of a model without asking the hub: the cached snapshot of a hub name, else `path` itself."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # `path` is no hub name
            found = try_to_load_from_cache(path, "config.json", revision=revision)
            return Path(found).parent if isinstance(found, str) else folder
    return folder


def checked(folder: Path, problems: Iterable[str], key: str = "model.path") -> Path:
    """Return the folder, or raise ConfigError with these problems, one a line."""
    if texts := list(problems):
        raise ConfigError("\n".join(f"{key}: {text}" for text in texts))
    return folder
