"""The folder that the files are written to.

Guarantee: no file that is there, and may have been changed by hand, is overwritten: one with other content refuses them all.
"""

from collections.abc import Mapping
from pathlib import Path

from protocol.errors import ConfigError


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Scripts become executable.

    Raises:
        ConfigError: the folder has one of them with another content, or cannot be written.
    """
    try:
        changed = [
            name for name, text in files.items() if (folder / name).exists() and (folder / name).read_text() != text
        ]
        if changed:
            raise ConfigError(
                f"--out {folder}: {', '.join(changed)} is there with other content, and is not overwritten; move it away, or "
                "choose another folder"
            )
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                file.chmod(0o755)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--out {folder}: {error}") from error
