"""The fields of the classes that own library sections, read from the source of the installed release.

Guarantee: no library is imported. Each field is one that the class itself takes; its hint is that of the class, or `Any` where
the source alone does not tell it. A class that is not found has no fields at all.
"""

import ast
import builtins
import collections.abc
import enum
import functools
import importlib.util
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CLASSES = {
    "engine": ("vllm.engine.arg_utils", "AsyncEngineArgs"),
    "lora": ("peft.tuners.lora.config", "LoraConfig"),
    "trainer": ("trl.trainer.grpo_config", "GRPOConfig"),
    "sft": ("trl.trainer.sft_config", "SFTConfig"),
}
"""The class of each library section."""
UNKNOWN = object()
"""The default of a field whose source does not tell it."""
_TYPING: dict[str, Any] = {"typing": typing, "typing_extensions": typing, "collections.abc": collections.abc}
_TYPES = {name: getattr(builtins, name) for name in ("int", "float", "str", "bool", "dict", "list", "set", "tuple")}


class LibraryField(NamedTuple):
    hint: Any
    default: Any


ANY = LibraryField(Any, UNKNOWN)
"""A field of which nothing is known."""


class _UnreadableError(Exception):
    """Say that the source alone does not tell it."""


def library_name(section: str) -> str:
    """Return the class of a section as messages name it."""
    module, name = CLASSES[section]
    return f"{module.partition('.')[0]}.{name}"


def fields_of(section: str) -> dict[str, LibraryField] | None:
    """Return the fields of the class that owns a section; None if it is not found here."""
    return fields_of_class(*CLASSES[section])


@functools.cache
def fields_of_class(module: str, name: str) -> dict[str, LibraryField] | None:
    """Return the fields of a class by the name of its module; None if it is not found here."""
    try:
        return dict(_fields(*_found(module, name)))
    except (_UnreadableError, OSError, SyntaxError, ValueError, RecursionError):
        return None


class _Module:
    """The top level of a library's file: what it defines and imports at its top level."""

    def __init__(self, name: str, file: Path) -> None:
        self.package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        self.nodes: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self._is_package = file.name == "__init__.py"
        self._read(ast.parse(file.read_bytes()).body)

    def _read(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self.nodes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.nodes[node.targets[0].id] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.nodes[node.target.id] = node
            elif isinstance(node, ast.ImportFrom):
                above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*above, *filter(None, [node.module])])
                self.imports |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
            elif isinstance(node, ast.If):
                # For type checkers alone is what a lazy package has, and what other modules do not see while they run.
                if self._is_package or ast.unparse(node.test) != "TYPE_CHECKING":
                    self._read(node.body)
                self._read(node.orelse)
            elif isinstance(node, ast.Try):
                self._read(node.body)


@functools.cache
def _module(name: str) -> _Module:
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)  # of a top-level package, which is not imported for it
    if spec is None or not spec.submodule_search_locations:
        raise _UnreadableError
    place = Path(next(iter(spec.submodule_search_locations)), *rest)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        raise _UnreadableError
    return _Module(name, file)


def _found(module_name: str, name: str) -> tuple[_Module, ast.stmt]:
    """Follow imports to the statement that defines a name."""
    module = _module(module_name)
    if name in module.nodes:
        return module, module.nodes[name]
    if name not in module.imports:
        raise _UnreadableError
    return _found(*module.imports[name])


def _of_name(module: _Module, name: str) -> tuple[_Module, ast.stmt]:
    if name in module.nodes:
        return module, module.nodes[name]
    if name not in module.imports:
        raise _UnreadableError
    return _found(*module.imports[name])


def _fields(module: _Module, node: ast.stmt) -> Iterator[tuple[str, LibraryField]]:
    """Yield the fields of a dataclass, those of its bases first."""
    if not isinstance(node, ast.ClassDef):
        raise _UnreadableError
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id not in ("object", "PushToHubMixin"):
            yield from _fields(*_of_name(module, base.id))
    documented = dict(
        re.findall(r"^ *(\w+) \((`.*?)(?:, \*optional\*.*)?\):", ast.get_docstring(node) or "", re.MULTILINE)
    )
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" in ast.unparse(statement.annotation) or _is_no_argument(statement.value):
                continue
            name = statement.target.id
            hint = _widened(_hint(statement, module), documented.get(name, ""))
            if module.package.startswith("transformers"):  # it makes members of all texts
                hint = _without_text(hint)
            yield name, LibraryField(hint, _default(statement.value, module))


def _widened(hint: Any, documented: str) -> Any:
    """Add `bool` where the docstring has it and the annotation has not."""
    return typing.Union[hint, bool] if "`bool`" in documented and hint is str else hint  # noqa: UP007 - of values


def _without_text(hint: Any) -> Any:
    parts = typing.get_args(hint)
    members = [part for part in parts if isinstance(part, enum.EnumMeta)]
    return typing.Union[tuple(part for part in parts if part is not str)] if members else hint  # noqa: UP007


def _is_no_argument(value: ast.expr | None) -> bool:
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return any(
        keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and not keyword.value.value
        for keyword in keywords
    )


def _hint(statement: ast.AnnAssign, module: _Module) -> Any:
    try:
        return _type(statement.annotation, module)
    except (_UnreadableError, OSError, SyntaxError, TypeError, ValueError, AttributeError, RecursionError):
        return Any


def _type(node: ast.expr, module: _Module) -> Any:
    if isinstance(node, ast.Constant):
        return _type(ast.parse(node.value, mode="eval").body, module) if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return typing.Union[_type(node.left, module), _type(node.right, module)]  # noqa: UP007 - of values
    if isinstance(node, ast.Subscript):
        generic = _type(node.value, module)
        if generic is typing.Literal:
            return typing.Literal[ast.literal_eval(node.slice)]
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        types = [_type(part, module) for part in parts]
        return generic[types[0] if len(types) == 1 else tuple(types)]
    if not isinstance(node, ast.Name):
        raise _UnreadableError
    if node.id in _TYPES and node.id not in module.nodes:
        return _TYPES[node.id]
    place, name = module.imports.get(node.id, ("", ""))
    if place in _TYPING:
        return getattr(_TYPING[place], name)
    owner, definition = _of_name(module, node.id)
    if isinstance(definition, ast.ClassDef):
        return _enum(definition)
    if isinstance(definition, ast.Assign | ast.AnnAssign) and definition.value is not None:
        return _type(definition.value, owner)
    raise _UnreadableError


def _enum(node: ast.ClassDef) -> type[enum.Enum]:
    """Make an enum of the same members; its values are what a file may have."""
    if not any("Enum" in ast.unparse(base) for base in node.bases):
        raise _UnreadableError
    members = {
        one.targets[0].id: ast.literal_eval(one.value)
        for one in node.body
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    }
    return enum.Enum(node.name, members)  # type: ignore[return-value]


def _default(node: ast.expr | None, module: _Module) -> Any:
    try:
        return _value(node, module)
    except (_UnreadableError, OSError, SyntaxError, ValueError, RecursionError):
        return UNKNOWN


def _value(node: ast.expr | None, module: _Module) -> Any:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _value_in_class(*_of_name(module, node.value.id), node.attr)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "get_field" and isinstance(node.args[0], ast.Name):
            return _value_in_class(*_of_name(module, node.args[0].id), ast.literal_eval(node.args[1]))
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if node.func.id in ("field", "Field") and ("default" in given or node.args):
            return _value(given.get("default") or node.args[0], module)
    if node is None:
        raise _UnreadableError
    return ast.literal_eval(node)


def _value_in_class(module: _Module, node: ast.stmt, name: str) -> Any:
    for statement in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name:
            return _value(statement.value, module)
    raise _UnreadableError
