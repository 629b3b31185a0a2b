"""Python sources that are read and never imported: what a release defines, and what code of ours uses of it.

Guarantee: the same reading works on an installed package and on an unpacked wheel, without its dependencies.
"""

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


class Sources:
    """One release below `root`, the folder that holds its packages. Names are `package.module:Class.method`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, name: str) -> tuple[str, ast.AST]:
        """Return the module that defines `name`, and the definition. Raises LookupError."""
        module, _, path = name.partition(":")
        first, _, rest = path.partition(".")
        module, node = self._in_module(module, first)
        for part in filter(None, rest.split(".")):
            if not isinstance(node, ast.ClassDef):
                raise LookupError(f"{name}: {first} is no class")
            module, node = self.member(module, node, part)
        return module, node

    def member(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.AST]:
        """Return what a class, or the first of its bases that does, defines or assigns as `name`. Raises LookupError."""
        for owner, base in self.with_bases(module, node):
            if (found := defined(base, name)) is not None:
                return owner, found
        raise LookupError(f"{module}:{node.name} has no {name}")

    def with_bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class, then its bases as far as this release defines them."""
        yield module, node
        for base in node.bases:
            if isinstance(base, ast.Name):
                try:
                    owner, found = self._in_module(module, base.id)
                except LookupError:
                    continue
                if isinstance(found, ast.ClassDef):
                    yield from self.with_bases(owner, found)

    def signature(self, name: str) -> inspect.Signature:
        """The signature of a function, or of a class as its constructor or its fields give it."""
        module, node = self.find(name)
        if isinstance(node, ast.ClassDef):
            fields = [
                (field.target.id, field.value is not None)
                for _, base in reversed(list(self.with_bases(module, node)))
                for field in base.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            ]
            own = defined(node, "__init__")
            if own is None and fields:
                return _of_fields(dict(fields))
            node = own or self.member(module, node, "__init__")[1]
        if not isinstance(node, Function):
            raise LookupError(f"{name} is no function")
        return self.of_function(node)

    @staticmethod
    def of_function(node: Function) -> inspect.Signature:
        given = node.args
        positional = [*given.posonlyargs, *given.args]
        required = len(positional) - len(given.defaults)
        kinds = inspect.Parameter
        parameters = [
            kinds(each.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if number < required else None)
            for number, each in enumerate(positional)
        ]
        if given.vararg:
            parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
        parameters += [
            kinds(each.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
            for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        ]
        if given.kwarg:
            parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
        return inspect.Signature(parameters)

    def _in_module(self, module: str, name: str, seen: tuple[str, ...] = ()) -> tuple[str, ast.AST]:
        tree = parsed(self._file(module))
        if (found := defined(tree, name)) is not None:
            return module, found
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    source = self._absolute(module, node)
                    if name == (alias.asname or alias.name) and source not in seen:
                        return self._in_module(source, alias.name, (*seen, module))
        lazy = defined(tree, "__getattr__")
        if lazy is not None and f"'{name}'" in ast.unparse(lazy):
            return module, lazy
        raise LookupError(f"{module} defines no {name}")

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        kept = len(parts) - node.level + (self._file(module).name == "__init__.py")
        return ".".join([*parts[:kept], *filter(None, [node.module])])

    def _file(self, module: str) -> Path:
        path = self.root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        raise LookupError(f"there is no module {module}")


def defined(node: ast.AST, name: str) -> ast.AST | None:
    """The function, class or assignment of `name` in a module or class; in a class also an assignment to `self.name`."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == name:
            return child
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return child
    if isinstance(node, ast.ClassDef):
        for child in ast.walk(node):
            if (
                isinstance(child, ast.Attribute)
                and isinstance(child.ctx, ast.Store)
                and attribute(child) == f"self.{name}"
            ):
                return child
    return None


def attribute(node: ast.AST) -> str | None:
    """`a.b.c` of a chain of attributes that begins with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := attribute(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def attributes_of(node: ast.AST, name: str) -> set[str]:
    """The attributes of variable `name` that code reads without asking whether they are there."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load) and attribute(child.value) == name
    }


def call_of(text: str) -> tuple[str, list[None], dict[str, None]]:
    """The name, the positional and the named arguments of a call that is written as Python writes it."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    return ast.unparse(call.func), *arguments_of(call)


def arguments_of(call: ast.Call) -> tuple[list[None], dict[str, None]]:
    return [None] * len(call.args), {each.arg: None for each in call.keywords if each.arg is not None}


def _of_fields(fields: dict[str, bool]) -> inspect.Signature:
    """Of a class whose constructor is made of its fields; one with a default may come before one without."""
    kinds = inspect.Parameter
    has_default = False
    parameters = []
    for name, optional in fields.items():
        has_default = has_default or optional
        parameters.append(kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=None if has_default else kinds.empty))
    return inspect.Signature(parameters)
