"""Digests that tell whether two processes hold the same base model and tokenizer, without loading either.

Guarantee: equal folders give equal digests on every machine; another fine-tune of the same architecture gives another
one. Weights are sampled (16 evenly spaced MiB per file, with its size), so a 70B model takes milliseconds, not minutes.
"""

import hashlib
import json
from pathlib import Path

from protocol.errors import ConfigError

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
_VOLATILE_CONFIG_KEYS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


def resolve_model(path: str, revision: str | None = None) -> Path:
    """The local folder of a model: `path` itself, or the snapshot of a hub name (downloaded if need be).

    Raises:
        ConfigError: neither a local model folder nor a hub model that can be had.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {path} has no config.json, so it is not a transformers model folder")
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path: {path} does not exist")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                path, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
            )
        )
    except Exception as error:
        raise ConfigError(
            f"model.path: {path} is neither a local folder nor a hub model that could be fetched: {error}"
        ) from error


def base_model_digest(folder: Path) -> str:
    """sha256 over the configuration and samples of every weight file, as 64 hex digits."""
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in _VOLATILE_CONFIG_KEYS:
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
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


def tokenizer_digest(folder: Path) -> str:
    """sha256 over the files that decide token ids and the chat template, as 64 hex digits."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
