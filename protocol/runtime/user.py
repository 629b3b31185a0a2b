"""A name of this user, and folders that can be written for what libraries keep of one.

Guarantee: after `settle_user` every library finds a name, a home, caches and a place for temporary files, also where this user
has no entry among those of the system, no home, or a home that cannot be written. What is in such a home is still read from
there. Nothing is changed for any other user.
"""

import hashlib
import logging
import os
import pwd
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
_MOST_CHARS = 40  # of a place for sockets, whose paths end at 107 bytes


def settle_user() -> None:
    """Set variables of the environment. Raises ConfigError if no temporary file can be written anywhere."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("LOGNAME", f"uid-{os.getuid()}")  # `getpass.getuser` looks here first
    _settle_temporary()
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute() or not _can_be_written(home / ".cache") or not os.access(home, os.W_OK):
        place = _own_place()
        logger.warning(
            "HOME: %s cannot be written; what libraries keep is in %s, until HOME is a folder that can", home, place
        )
        if home.is_dir():
            _keep_beside(home, place)
        else:
            os.environ["HOME"] = str(place)
    for name, folder in (("XDG_CACHE_HOME", ".cache"), ("XDG_CONFIG_HOME", ".config")):
        if (given := os.environ.get(name)) and not _can_be_written(Path(given)):
            os.environ[name] = str(_own_place() / folder)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME") or home, ".cache")
    if not _PLAIN.fullmatch(caches):  # torch's compilers get it in a command that is cut at spaces
        os.environ.setdefault("VLLM_CACHE_ROOT", os.path.join(plain_path(caches), "vllm"))
    if (given := os.environ.get("HF_HOME")) and not _can_be_written(Path(given)):
        for name, folder in (("HF_DATASETS_CACHE", "datasets"), ("HF_MODULES_CACHE", "modules")):
            os.environ.setdefault(name, str(_own_place() / ".cache" / "huggingface" / folder))


def plain_path(path: str) -> str:
    """Return a short path without characters that a shell or a pattern knows: a link to `path`."""
    place = _own_place()
    for left in place.iterdir():
        if left.is_symlink() and not left.exists():
            left.unlink(missing_ok=True)
    link = place / hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:12]
    with suppress(FileExistsError):
        link.symlink_to(os.path.abspath(path))
    return str(link)


def _settle_temporary() -> None:
    """Let this process and its programs use the folder that Python takes where TMPDIR cannot be used, by a path that compilers
    and sockets can have."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            f"TMPDIR: no temporary file can be written: {error.strerror}; make room, or name a folder"
        ) from error
    if (given := os.environ.get("TMPDIR")) and os.path.abspath(given) != place:
        logger.warning("TMPDIR: %s cannot be written; temporary files are in %s", given, place)
        os.environ["TMPDIR"] = place
    if not _is_for_sockets(place):
        os.environ["TMPDIR"] = tempfile.tempdir = plain_path(place)


def _is_for_sockets(place: str) -> bool:
    return len(place) <= _MOST_CHARS and bool(_PLAIN.fullmatch(place))


def _keep_beside(home: Path, place: Path) -> None:
    os.environ.setdefault("XDG_CACHE_HOME", str(place / ".cache"))
    os.environ.setdefault("XDG_CONFIG_HOME", str(place / ".config"))
    for name in ("TRITON_HOME", "FLASHINFER_WORKSPACE_BASE"):
        os.environ.setdefault(name, str(place))
    if "HF_HOME" not in os.environ and (kept := home / ".cache" / "huggingface").is_dir():
        os.environ.setdefault("HF_HUB_CACHE", str(kept / "hub"))
        os.environ.setdefault("HF_TOKEN_PATH", str(kept / "token"))


def _own_place() -> Path:
    temporary = tempfile.gettempdir()
    place = Path(temporary if _is_for_sockets(temporary) else "/tmp") / f"slipstream-home-{os.getuid()}"  # noqa: S108
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        state = place.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o077 or place.is_symlink():
            raise PermissionError(f"{place} is not this user's alone")
    except OSError as error:
        raise ConfigError(
            f"HOME, TMPDIR: {error}; set both to folders of yours, with short names of letters and digits"
        ) from error
    return place


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
