"""The installed packages that a run's own files import, on the trainer's host and on a producer's.

Guarantee: nothing is imported to find out. What is missing is named with the version that the trainer has, and so is what is
there in another version.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from protocol.bundle.bundle import Requirement


def requirements(installed: Mapping[str, str]) -> list[Requirement]:
    """
    Args:
        installed: modules that are no files of the run, each with a file that imports it.
    """
    owners = packages_distributions() if installed else {}
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
        return f"{what}, nor on the trainer's host; install it here, or start the trainer in the folder that has it"
    return f"{what}; the trainer's host has {one.package} {one.version}: pip install '{one.package}=={one.version}'"
