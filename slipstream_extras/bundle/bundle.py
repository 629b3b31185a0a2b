"""A bundle: what a producer fetches from its trainer with `--connect`, and whether this host has the packages that it needs.

Guarantee: a bundle that was read holds at most `MOST_FILES` files and `LARGEST_BUNDLE_BYTES`, each under a plain relative name,
or a `BundleError` was raised. Nothing of the run is imported or executed to tell what is missing.
"""

import hashlib
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from protocol.errors import BundleError

LARGEST_BUNDLE_BYTES = 16 * 2**20
MOST_FILES = 1000
CONFIG_FILE = "run.yaml"

_Text = Annotated[str, Meta(max_length=4096)]
_Texts = Annotated[list[_Text], Meta(max_length=1000)]
_NAME, _LONGEST_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]+"), 255  # bytes, for any file system


class BundledFile(Struct, frozen=True):
    """`name` is relative to the folder of the run, with `/` between its parts."""

    name: _Text
    content: bytes


class Requirement(Struct, frozen=True):
    """A module that files of the bundle import and that is not in it. `version` is that of the package which brings it on the
    trainer's host ("": it has none)."""

    module: _Text
    package: _Text
    version: _Text
    needed_by: _Text


class Bundle(Struct, frozen=True):
    """`files` has the configuration, `CONFIG_FILE`, and Python files. `host_keys` are keys of the configuration that were left
    out because each host has its own value. Unknown fields are ignored: they are a newer release's."""

    files: Annotated[list[BundledFile], Meta(max_length=MOST_FILES)]
    requirements: Annotated[list[Requirement], Meta(max_length=MOST_FILES)] = []
    host_keys: _Texts = []


def encode(bundle: Bundle) -> bytes:
    """Raise BundleError if it is larger than a bundle may be, or has a file that no producer would take."""
    _check_names(bundle)
    data = msgspec.msgpack.encode(
        msgspec.structs.replace(
            bundle,
            files=sorted(bundle.files, key=lambda file: file.name),
            requirements=sorted(bundle.requirements, key=lambda requirement: requirement.module),
            host_keys=sorted(bundle.host_keys),
        )
    )
    check_size(len(data))
    return data


def decode(data: bytes) -> Bundle:
    check_size(len(data))
    try:
        bundle = msgspec.msgpack.decode(data, type=Bundle)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BundleError(f"the trainer's bundle cannot be read: {error}") from error
    _check_names(bundle)
    return bundle


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_size(num_bytes: int) -> None:
    if num_bytes > LARGEST_BUNDLE_BYTES:
        raise BundleError(
            f"the run's bundle has {num_bytes} bytes, and {LARGEST_BUNDLE_BYTES} are allowed: it is for configuration and "
            "Python files; put data where every host finds it, or install large code as a package"
        )


def unpack(bundle: Bundle, folder: Path) -> None:
    """Write the files below `folder`, which is empty and this process's own. Raises BundleError if they cannot be written."""
    try:
        for file in bundle.files:
            place = folder / file.name
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(place, "xb", opener=_private) as stream:
                stream.write(file.content)
    except OSError as error:
        raise BundleError(
            f"the run's files cannot be written to {folder} ({error.strerror}): make room there, or name a folder with room in "
            "TMPDIR"
        ) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _check_names(bundle: Bundle) -> None:
    names = [file.name for file in bundle.files]
    if CONFIG_FILE not in names:
        raise BundleError(f"the bundle has no {CONFIG_FILE}")
    folders = {parent for name in names for parent in _parents(name)}
    for name, count in Counter(names).items():
        if not is_plain(name):
            raise BundleError(f"the bundle has a file called {name!r}, which is no plain name below the run's folder")
        if name != CONFIG_FILE and not name.endswith(".py"):
            raise BundleError(f"the bundle has a file called {name!r}, which is neither {CONFIG_FILE} nor Python")
        if name in folders or count > 1:
            raise BundleError(f"the bundle has {name!r} twice")


def is_plain(name: str) -> bool:
    """Return whether it is a relative path in which nothing leads upwards."""
    parts = name.split("/")
    return len(name) <= 1024 and all(
        _NAME.fullmatch(part) and len(part.encode()) <= _LONGEST_NAME and part not in (".", "..") for part in parts
    )


def _parents(name: str) -> Iterator[str]:
    parts = name.split("/")[:-1]
    return ("/".join(parts[: number + 1]) for number in range(len(parts)))


def requirements(installed: Mapping[str, str]) -> list[Requirement]:
    """Return the packages that a bundle needs beside its files.

    Args:
        installed: modules that are no files of the run, each with a file that imports it.
    """
    is_any_there = any(map(_is_there, installed))  # or there is no need to read what files each package has
    owners = packages_distributions() if is_any_there else {}
    return [_requirement(module, owners.get(module, [module])[0], by) for module, by in sorted(installed.items())]


def _requirement(module: str, package: str, needed_by: str) -> Requirement:
    return Requirement(module, package, _version(package), needed_by)


def _version(package: str) -> str:
    """ "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def missing(needed: Iterable[Requirement]) -> list[str]:
    """A sentence with its fix for each that this process cannot import."""
    return [_explain(one) for one in needed if not _is_there(one.module)]


def differing(needed: Iterable[Requirement]) -> list[str]:
    """A sentence for each that this process has in another version than the trainer's host."""
    return [
        f"{one.needed_by} imports {one.module}: {one.package} is {here} here and {one.version} on the trainer's host"
        for one in needed
        if (here := _version(one.package)) and one.version and here != one.version
    ]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _explain(one: Requirement) -> str:
    what = f"{one.needed_by} imports {one.module}, which is not installed here"
    if not one.version:
        return f"{what}, nor on the trainer's host; install it here, or put it into the folder of the run's YAML file"
    return f"{what}; the trainer's host has {one.package} {one.version}: pip install '{one.package}=={one.version}'"
