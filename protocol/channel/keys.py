"""The keys by which trainer and producers know each other, as files.

Guarantee: a secret is read only from a file that no other user can read. It is written once, never over another one, and appears
in no text that this process makes. Every refusal names the file and the fix.

    keys/trainer.secret          the trainer's host only, 0600
    keys/trainer.public          every host
    keys/NAME.secret             the host of producer NAME only, 0600
    keys/NAME.public             where `slipstream keys authorize` can find it
    keys/authorized/NAME.public  the trainer's host: producers that may connect

A key file is one line: the kind of key, the name of its owner and the key in Z85. Under systemd a secret may instead be the
credential `trainer.secret` or `producer.secret`.
"""

import base64
import hashlib
import os
import re
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

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
                raise ConfigError(f"{where}: others can read this secret. Fix: chmod 600 {file}")
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


TRAINER = "trainer"
AUTHORIZED = "authorized"

_IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_SECRET, _PUBLIC = "slipstream-secret-key", "slipstream-public-key"
_KEY_CHARACTERS = 40  # 32 bytes in Z85


class SecretKey:
    """A secret that no formatting shows. `reveal` is for the socket that needs it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def reveal(self) -> bytes:
        return self._key

    def public(self) -> bytes:
        return zmq.curve_public(self._key)

    def __repr__(self) -> str:
        return "SecretKey(...)"

    def __reduce__(self) -> str:
        raise TypeError("a secret key does not leave its process")


@dataclass(frozen=True)
class TrainerKeys:
    secret: SecretKey
    authorized: Path  # folder of the public keys that may connect


@dataclass(frozen=True)
class ProducerKeys:
    identity: str
    secret: SecretKey
    trainer: bytes  # public key
    trainer_file: Path  # where that was found


def check_identity(name: str) -> str:
    """Return `name`, or raises `ConfigError` if it is none for a producer's key."""
    if not _IDENTITY.match(name):
        raise ConfigError(
            f"{name!r} is no name for a key: use up to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit"
        )
    return name


def process_name(keys: ProducerKeys | None) -> str:
    """A new name for this process, which begins with that of its key; without one, with that of its host."""
    owner = keys.identity if keys else socket.gethostname()[:64]
    return f"{owner}-{os.getpid()}-{secrets.token_hex(2)}"


def identity_of(producer: str) -> str:
    """The name of the key that a producer process must have: processes are called IDENTITY-PID-HEX."""
    return producer.rsplit("-", 2)[0]


def fingerprint(public: bytes) -> str:
    """A short text that people compare instead of a public key."""
    digest = hashlib.sha256(z85.decode(public)).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def trainer_keys(folder: Path) -> TrainerKeys:
    _, secret = _own_secret(folder, TRAINER, TRAINER, "")
    return TrainerKeys(secret, folder / AUTHORIZED)


def producer_keys(folder: Path, identity: str | None) -> ProducerKeys:
    """The keys of the producer `identity`, by default the name of this host; `ConfigError` says what is missing, not private or
    another's."""
    wanted = None if identity is None and _credential("producer") else check_identity(identity or socket.gethostname())
    how = f", then authorize {wanted}.public on the trainer's host; or name another key with transport.identity"
    name, secret = _own_secret(folder, "producer", wanted, how)
    file = folder / f"{TRAINER}.public"
    if not file.exists():
        raise ConfigError(f"transport.keys: {file}: no such file. Copy it from the trainer's host")
    owner, trainer = read_public(file)
    _check_owner(file, owner, TRAINER)
    return ProducerKeys(name, secret, trainer, file)


def _own_secret(folder: Path, role: str, wanted: str | None, how: str) -> tuple[str, SecretKey]:
    """The owner's name and the secret key of this process, from a credential of systemd or from the file of `wanted`. `how`
    says what else to do after the key was made."""
    _check_writers(folder)
    file = _credential(role) or folder / f"{wanted}.secret"
    if not file.exists():
        raise ConfigError(
            f"transport.keys: {file}: no such file. Make it: slipstream keys --keys {folder} generate {wanted}{how}"
        )
    name, secret = read_secret(file)
    _check_owner(file, name, wanted or name)
    if name == TRAINER != role:
        raise ConfigError(f"transport.keys: {file} is the trainer's key; a producer needs one of its own")
    return name, secret


def _check_owner(file: Path, name: str, wanted: str) -> None:
    if name != wanted:
        of = "the trainer" if wanted == TRAINER else wanted
        raise ConfigError(f"transport.keys: {file} is the key of {name}, not of {of}")


def generate(folder: Path, name: str) -> bytes:
    """Make the key pair `name` in `folder` and returns the public key; `ConfigError` if there is one or it cannot be
    written."""
    check_identity(name)
    try:
        (folder / AUTHORIZED if name == TRAINER else folder).mkdir(parents=True, exist_ok=True, mode=0o755)
        _check_writers(folder)
        for suffix in ("secret", "public"):
            if (folder / f"{name}.{suffix}").exists():
                raise ConfigError(f"{folder / f'{name}.{suffix}'} exists and is not overwritten; move it away first")
        public, secret = zmq.curve_keypair()
        _write_new(folder / f"{name}.secret", _line(_SECRET, name, secret), 0o600)
        write_public(folder / f"{name}.public", name, public)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    return public


def write_public(file: Path, name: str, key: bytes) -> None:
    """Make a new file, which appears whole or not at all. `FileExistsError` if there is one."""
    _write_new(file, _line(_PUBLIC, name, key), 0o644)


def read_public(file: Path) -> tuple[str, bytes]:
    """The owner's name and the public key in `file`, or `ConfigError`."""
    return _parse(file, read_private(file, others_may_read=True), _PUBLIC)


def read_secret(file: Path) -> tuple[str, SecretKey]:
    """The owner's name and the secret key in `file`, or `ConfigError`."""
    name, key = _parse(file, read_private(file), _SECRET)
    return name, SecretKey(key)


def _credential(role: str) -> Path | None:
    place = os.environ.get("CREDENTIALS_DIRECTORY")
    file = Path(place) / f"{role}.secret" if place else None
    return file if file is not None and file.exists() else None


def _check_writers(folder: Path) -> None:
    """Refuse a folder of keys that others may write to, because they could add a key and so decide who connects."""
    for place in (folder, folder / AUTHORIZED):
        if place.is_dir() and place.stat().st_mode & 0o022:
            raise ConfigError(f"transport.keys: others may write to {place}, and so add keys. Fix: chmod go-w {place}")


def _line(kind: str, name: str, key: bytes) -> bytes:
    return f"{kind} {name} {key.decode()}\n".encode()


def _write_new(file: Path, content: bytes, mode: int) -> None:
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as out:
            out.write(content)
            os.fchmod(descriptor, mode)
            out.flush()
            os.fsync(descriptor)
        os.link(partial, file)
    finally:
        partial.unlink()


def _parse(file: Path, content: bytes, kind: str) -> tuple[str, bytes]:
    """Parse a key file. Errors quote nothing, because the content may be a secret."""
    words = content.split()
    if len(words) != 3 or words[0] != kind.encode():
        wrong = next(
            (other for other in (_SECRET, _PUBLIC) if other != kind and content.startswith(other.encode())), None
        )
        found = f"holds a {wrong}" if wrong else "is not a key file"
        raise ConfigError(f"{file}: {found}; expected one line `{kind} NAME KEY`, as slipstream keys writes it")
    name, key = words[1].decode("ascii", "replace"), words[2]
    if not _IDENTITY.match(name):
        raise ConfigError(f"{file}: the name in it is none that slipstream keys would give")
    if len(key) != _KEY_CHARACTERS or not set(key) <= set(z85.Z85CHARS):
        raise ConfigError(f"{file}: the key in it is damaged: it is not {_KEY_CHARACTERS} characters of Z85")
    return name, key
