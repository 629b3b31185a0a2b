"""What a Python file imports, read from its text: no code of the run is executed.

Guarantee: every `import` statement is found, also those inside functions. An import that may fail, because an `except` for it
stands below, or that only a type checker sees, is no need of the file. What is imported by a computed name is not found.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class Import(NamedTuple):
    """`module` is a dotted name. It is not `needed` where the file works without it, or where it may be the name of something
    inside a module instead."""

    module: str
    needed: bool


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """
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
    """The package that so many dots name."""
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
