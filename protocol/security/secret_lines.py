"""Secrets that a user gives, in files and in environment variables.

Guarantee: a secret file is read only if nobody else can read it. A secret that goes into a header is one line of printable
characters. No message quotes any of it.
"""

import os
import stat
from pathlib import Path

from protocol.errors import ConfigError

_MAX_BYTES = 2**16


def read_private(file: Path, place: str = "", *, others_may_read: bool = False) -> bytes:
    """The content of a file, up to 64 KiB; `ConfigError` if it cannot be read, or if others can read it and may not. `place`
    is the key of the configuration that names it. Others cannot reach a credential of systemd, whatever its mode is: it carries
    an ACL."""
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    is_private = others_may_read or (bool(credentials) and file.parent == Path(str(credentials)))
    where = f"{place}: {file}" if place else str(file)
    try:
        with file.open("rb") as opened:
            if not is_private and stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise ConfigError(f"{where}: others can read this secret. Mend it: chmod 600 {file}")
            return opened.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error


def secret_line(raw: bytes, where: str) -> str:
    """The line as text, without the newline that `echo` and editors put at its end; `ConfigError` if it is empty, or holds
    more lines or a character that does not print."""
    line = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: it is not text in UTF-8") from None
    if not text:
        raise ConfigError(f"{where}: it is empty")
    if not text.isprintable():
        raise ConfigError(
            f"{where}: it holds a character that does not print, such as a line break in the middle; expected one line of "
            "text. Write it with `printf %s SECRET`"
        )
    return text
