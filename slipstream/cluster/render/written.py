"""The folder that the files are written to.

Guarantee: no file that is there, and may have been changed by hand, is overwritten: one with other content refuses them all.
"""

from collections.abc import Mapping
from pathlib import Path

from protocol.errors import ConfigError
from protocol.runtime.files import staged


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Scripts become executable. A file is there whole or not at all.

    Raises:
        ConfigError: the folder has one of them with another content, or cannot be written.
    """
    try:
        changed = [
            name
            for name, content in files.items()
            if (folder / name).exists() and (folder / name).read_bytes() != content
        ]
        if changed:
            raise ConfigError(
                f"--out {folder}: {', '.join(changed)} is there with other content, and is not overwritten; move it away, or "
                "choose another folder"
            )
        for name, content in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with staged(file, durable=False) as partial:
                partial.write_bytes(content)
                if content.startswith(b"#!"):
                    partial.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error}") from error
