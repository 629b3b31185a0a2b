"""The folder of a base model: digests of it and of its tokenizer, and checkpoints of vision-language models.

Guarantee: equal folders have equal digests on every machine, and another fine-tune of the same architecture has another one.
Weights are sampled (16 evenly spaced MiB per file, and its size), so a 70B model takes milliseconds, not minutes. Where the
Python files of a model are run (`model.trust_remote_code`), both digests include them. Both daemons agree on which checkpoints
see or hear, of which they use the text model alone.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError, access_fix
from protocol.library_errors import reading
from protocol.wire.model_check import SENSES

_SAMPLES = 16
_SAMPLE_BYTES = 2**20
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "special_tokens_map.json",
)
_TOKENIZER_CONFIG_KEYS = (  # older models keep the chat template and the special tokens here
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "bos_token",
    "chat_template",
    "eos_token",
    "unk_token",
)
_VOLATILE_CONFIG_KEYS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


@contextlib.contextmanager
def unreadable_is_configuration() -> Iterator[None]:
    """A file of a model that cannot be read is a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"model.path: {error.filename} cannot be read: {error.strerror}; {access_fix(error)}"
        ) from error


@unreadable_is_configuration()
def base_model_digest(folder: Path, *, trust_remote_code: bool = False) -> str:
    """sha256 over the configuration and samples of every weight file, as 64 hex digits."""
    digest = hashlib.sha256()
    config = json_object(folder / "config.json")
    for key in _VOLATILE_CONFIG_KEYS:
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    if trust_remote_code:
        _add_code(digest, folder)
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not weights:
        raise ConfigError(f"model.path: {folder} has no weights (*.safetensors)")
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@unreadable_is_configuration()
def tokenizer_digest(folder: Path, *, trust_remote_code: bool = False) -> str:
    """sha256 over the files that decide token ids and the chat template, as 64 hex digits."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    file = folder / "tokenizer_config.json"
    if file.is_file():
        config = json_object(file)
        chosen = {key: config[key] for key in _TOKENIZER_CONFIG_KEYS if key in config}
        digest.update(json.dumps(chosen, sort_keys=True).encode())
    if trust_remote_code:
        _add_code(digest, folder)
    return digest.hexdigest()


@contextlib.contextmanager
def reading_model(what: str) -> Iterator[None]:
    """Surround the calls by which transformers reads a part of the model's folder. Raise ConfigError where it cannot."""
    try:
        with reading(f"model.path: transformers cannot read {what}"):
            yield
    except ConfigError as error:
        if "trust_remote_code" in str(error.__cause__):
            raise needs_own_code(what) from error
        raise


def needs_own_code(what: str) -> ConfigError:
    return ConfigError(
        f"model.path: transformers cannot read {what}: it needs the Python files that come with it; read them, and set "
        "model.trust_remote_code=true to run them"
    )


def _add_code(digest: Any, folder: Path) -> None:
    for file in sorted(folder.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())


def json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model. Raises ConfigError if the file holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model.path: {file} is not a JSON object")
    return value


_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)$")


class VisionLanguage(NamedTuple):
    """The facts of a vision-language checkpoint that a run needs.

    Attributes:
        placeholders: tokens in whose place images or videos are put.
    """

    architecture: str
    placeholders: frozenset[int]


def placeholders_of(folder: Path) -> frozenset[int]:
    """Return the placeholders of the model in this folder."""
    seen = vision_language(folder)
    return seen.placeholders if seen is not None else frozenset()


ANY_SIZE = 2**31
"""The number of tokens of a model whose configuration does not say it."""


@unreadable_is_configuration()
def vocabulary_size(folder: Path) -> int:
    """Return of how many tokens the model in this folder has embeddings."""
    config = json_object(folder / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else ANY_SIZE


@unreadable_is_configuration()
def vision_language(folder: Path) -> VisionLanguage | None:
    """Return the facts of the model in this folder if it sees or hears; None for a text model."""
    config = json_object(folder / "config.json")
    if not any(name.endswith("_config") and name.startswith(SENSES) for name in config):
        return None
    [architecture, *_] = config.get("architectures") or ["of no architecture"]
    found = {value for name, value in config.items() if _PLACEHOLDER.match(name)}
    return VisionLanguage(architecture, frozenset(token for token in found if isinstance(token, int)))
