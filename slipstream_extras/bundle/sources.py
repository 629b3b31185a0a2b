"""The Python files of a run that its functions need: their own, and the files that these import from the folder of the run.

Guarantee: only regular files below the folder are read, whatever imports and links say, and no more of them than a bundle may
have. Nothing is imported or executed. The folder is searched first, as Python does for a process that starts there; a module
that is not in it belongs to an installed package. Every `import` statement is found, also inside functions, but no computed name.
An import counts as optional if an `except` handles its failure, or if only a type checker sees it.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from protocol.config.functions import PACKAGES, is_plugin, plugin_module
from protocol.errors import BundleError
from slipstream_extras.bundle.bundle import LARGEST_BUNDLE_BYTES, MOST_FILES, check_size, is_plain

_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class Import(NamedTuple):
    """`module` is a dotted name. It is not `needed` where the file works without it, or where it may be the name of something
    inside a module instead."""

    module: str
    needed: bool


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Yield the modules that a file imports, and whether it needs each.

    Args:
        package: that of the file, dotted; "" outside of one.
    """
    return _in_block(tree.body, package, needed=True)


def _in_block(statements: list[ast.stmt], package: str, needed: bool) -> Iterator[Import]:
    for statement in statements:
        yield from _in_statement(statement, package, needed)


def _in_statement(statement: ast.AST, package: str, needed: bool) -> Iterator[Import]:
    match statement:
        case ast.Import(names=names):
            yield from (Import(alias.name, needed) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = ".".join(filter(None, (_upwards(package, level), module)))
            if base:
                yield Import(base, needed)
            yield from (Import(f"{base}.{alias.name}".lstrip("."), False) for alias in names if alias.name != "*")
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=otherwise):
            yield from _in_block(otherwise, package, needed)
        case ast.Try(body=body, handlers=handlers) | ast.TryStar(body=body, handlers=handlers):
            yield from _in_block(body, package, needed and not any(map(_catches, handlers)))
            for block in (*(handler.body for handler in handlers), statement.orelse, statement.finalbody):
                yield from _in_block(block, package, needed)
        case _:
            for name in _BLOCKS:
                for inner in getattr(statement, name, ()):
                    yield from _in_statement(inner, package, needed)


def _upwards(package: str, level: int) -> str:
    """The package that `level` dots of a relative import mean."""
    if level == 0:
        return ""
    parts = package.split(".")
    return ".".join(parts[: len(parts) - level + 1])


def _catches(handler: ast.ExceptHandler) -> bool:
    match handler.type:
        case None:
            return True
        case ast.Tuple(elts=kinds):
            return any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)
        case ast.Name(id=name):
            return name in _CAUGHT
    return False


@dataclass
class RunSources:
    """Collects what is needed. `files` is by name relative to `folder`, which is resolved; `installed` are modules that no file
    of the folder has, each with the first file that imports it."""

    folder: Path
    files: dict[str, bytes] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    _unread: list[tuple[str, ast.Module]] = field(default_factory=list)

    def add_code(self, place: str, group: str, key: str) -> str:
        """Add a user's function, as `add_function` does, or the package of a plugin of `group`."""
        if not is_plugin(place):
            return self.add_function(place, key)
        self.add_plugin(group, place, key)
        return place

    def add_function(self, spec: str, key: str) -> str:
        """A function of configuration key `key`. Returns its name as it is in the bundle: a file is named relative to the
        folder. Raises BundleError if the file is not there, lies elsewhere, or cannot be parsed."""
        place, _, name = spec.rpartition(":")
        if not place.endswith(".py"):
            if not self.add_module(place):
                self._note_installed(place, key)
            return spec
        file = (self.folder / place).resolve()
        if not file.is_relative_to(self.folder):
            raise BundleError(f"{key}: {file} is not below {self.folder}, the configuration's folder; move it there")
        if not file.is_file():
            raise BundleError(f"{key}: {spec}: there is no file {place} in {self.folder}")
        inside = file.relative_to(self.folder).as_posix()
        self._take(inside)
        self._follow()
        return f"{inside}:{name}"

    def add_plugin(self, group: str, name: str, key: str) -> None:
        """Add the package of a plugin to those that a producer has to install."""
        if module := plugin_module(group, name):
            self._note_installed(module, key)

    def add_module(self, module: str) -> bool:
        """Return whether the folder has it. Its packages come along. Raises BundleError as `add_function` does."""
        found = self._find(module)
        self._follow()
        return found

    def _follow(self) -> None:
        """A list instead of recursion: files may import each other in long chains."""
        while self._unread:
            name, tree = self._unread.pop()
            for module, needed in imports_of(tree, ".".join(name.split("/")[:-1])):
                if not self._find(module) and needed:
                    self._note_installed(module, name)

    def _find(self, module: str) -> bool:
        parts, found = module.split("."), False
        if parts[0] in PACKAGES:
            if self._has(f"{parts[0]}.py"):
                raise BundleError(
                    f"the run's functions import `{parts[0]}`, which is a package of Slipstream and not "
                    f"{self.folder / parts[0]}.py; give your file another name"
                )
            return False
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            if self._has(f"{name}/__init__.py"):
                found = self._take(f"{name}/__init__.py")
            elif self._has(f"{name}.py"):
                return self._take(f"{name}.py")
            elif not (self.folder / name).is_dir():
                break
        return found

    def _has(self, name: str) -> bool:
        place = self.folder / name
        if not place.is_file():
            return False
        if not place.resolve().is_relative_to(self.folder):
            raise BundleError(f"{place} is a link to {place.resolve()}, outside of the run's folder; make it a file")
        return True

    def _take(self, name: str) -> bool:
        if name not in self.files:
            self.files[name] = content = self._read(name)
            try:
                self._unread.append((name, ast.parse(content, filename=name)))
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise BundleError(f"{self.folder / name} is not valid Python: {error}") from error
        return True

    def _read(self, name: str) -> bytes:
        if len(self.files) >= MOST_FILES - 1:
            raise BundleError(f"the run's functions import more than {MOST_FILES - 1} files of {self.folder}")
        if not is_plain(name):
            raise BundleError(f"{self.folder / name} has a name that cannot travel; use letters, digits and `_`")
        try:
            with open(self.folder / name, "rb") as stream:
                content = stream.read(LARGEST_BUNDLE_BYTES + 1)
        except OSError as error:
            raise BundleError(f"{self.folder / name} cannot be read: {error.strerror}") from error
        check_size(len(content) + sum(map(len, self.files.values())))
        return content

    def _note_installed(self, module: str, needed_by: str) -> None:
        top = module.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in PACKAGES:
            self.installed.setdefault(top, needed_by)
