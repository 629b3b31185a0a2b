"""The installed packages that a run's own files import, on the trainer's host and on a producer's.

Guarantee: nothing is imported to find out. What is missing is named with the version that the trainer has.
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
    try:
        return Requirement(module, package, version(package), needed_by)
    except PackageNotFoundError:
        return Requirement(module, package, "", needed_by)


def missing(needed: Iterable[Requirement]) -> list[str]:
    """A sentence with its fix for each that this process cannot import."""
    return [_explain(one) for one in needed if not _is_there(one.module)]


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
