"""Functions that a configuration names, read and not run.

Guarantee: no user's code is imported. A file that makes names in ways that reading does not show has all names.
"""

import ast
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from protocol.check.columns import Columns
from protocol.config.section import nearest

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Code(NamedTuple):
    """The top level of a Python file.

    Attributes:
        names: each name with the statement that defines it.
        is_open: whether it may have other names.
        problem: why it cannot be read; then it has no names.
    """

    names: dict[str, ast.stmt]
    is_open: bool = False
    problem: str = ""


def file_of(place: str) -> Path | None:
    """Return the file of `file.py` or of a module in this folder; None where Python would have to find it."""
    file = Path(place if place.endswith(".py") else place.replace(".", "/") + ".py")
    return file if place.endswith(".py") or os.path.isfile(file) else None


def is_installed(module: str) -> bool:
    """Return whether the package of a module is here. Nothing is imported."""
    top = module.partition(".")[0]
    try:
        return os.path.isdir(top) or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def code_of(file: Path) -> Code:
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return Code({}, problem=f"{file}:{error.lineno}: it is no Python: {error.msg}")
    except (OSError, ValueError, RecursionError) as error:
        return Code({}, problem=f"{file}: it cannot be read: {error}")
    names = dict(_defined(tree.body))
    is_open = "*" in names or "__getattr__" in names
    is_open |= any(isinstance(node, ast.Name) and node.id in ("globals", "exec", "setattr") for node in ast.walk(tree))
    return Code(names, is_open)


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0], statement
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, statement
            for below in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(statement, below, []))
            for handler in getattr(statement, "handlers", []):
                yield from _defined(handler.body)


def problem_of(spec: str) -> str | None:
    """Return why there is no such function, with the nearest one; None where it may be there."""
    place, _, name = spec.rpartition(":")
    file = file_of(place)
    if file is None:
        return (
            None
            if is_installed(place)
            else f"there is neither a module {place} nor a file {place.replace('.', '/')}.py"
        )
    if not os.path.isfile(file):
        return f"there is no file {file}" + near_file(file)
    code = code_of(file)
    if code.problem or code.is_open or name in code.names:
        return code.problem or None
    functions = [one for one, statement in code.names.items() if isinstance(statement, Function | ast.ClassDef)]
    known = f"it has {', '.join(functions)}" if functions else "it defines nothing"
    return f"{file} has no `{name}`; {nearest(name, functions, known)}"


def near_file(file: Path) -> str:
    """Return a hint for a file or folder that is not there."""
    try:
        names = sorted(one.name for one in file.parent.iterdir())
    except OSError:
        return f"; there is no folder {file.parent} either"
    hint = nearest(file.name, names, "")
    return f"; {hint}" if hint else ""


def plain_function(spec: str) -> Function | None:
    """Return the definition of a function; None where it is something else, decorated, or not found."""
    place, _, name = spec.rpartition(":")
    file = file_of(place)
    statement = code_of(file).names.get(name) if file is not None and os.path.isfile(file) else None
    return statement if isinstance(statement, Function) and not statement.decorator_list else None


def argument_problems(function: Function, given: set[str], columns: Columns | None) -> Iterator[str]:
    """Yield why a function cannot be called with the arguments that it names.

    Args:
        given: names that every call has.
        columns: names of further arguments; None: unknown.
    """
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [one for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is None]
    for one in required:
        name = one.arg
        if one in arguments.posonlyargs:
            yield f"its argument `{name}` has no name for who calls it; remove the `/`"
        elif columns is not None and name not in given and name not in columns:
            hint = nearest(name, list(columns), f"rows have {', '.join(columns) or 'no other columns'}")
            yield f"it takes `{name}`, which no row has; {hint}"


def takes_one(function: Function) -> bool:
    """Return whether a function can be called with one value."""
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    return required <= 1 <= positional + (arguments.vararg is not None) and None not in arguments.kw_defaults


def returned_columns(function: Function) -> Columns | None:
    """Return the keys of the dictionaries that a transform writes out; None where reading does not tell them."""
    made: set[str] = set()
    for node in _own(function):
        if not isinstance(node, ast.Return) or node.value is None or ast.unparse(node.value) == "None":
            continue
        if not isinstance(node.value, ast.Dict):
            return None
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.value.keys]
        if not all(isinstance(key, str) for key in keys):
            return None
        made |= {str(key) for key in keys}
    return Columns(frozenset(made)) if made else None


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through a function without those inside of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own(child)
