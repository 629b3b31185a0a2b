"""The arguments of the libraries' own sections, read from the sources of the installed releases without importing them.

Guarantee: `problems` names a key that the library does not know, with the nearest one that it does, and a value that a field
of a plain type cannot take; both as `protocol.config.library_section.build` does when the library is imported. What only the
library can judge (values of its own types, values that exclude each other, the section of a library that is not installed)
is left to it.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union

from protocol.config.library_rules import for_library
from protocol.config.library_section import convert, unknown

_Source = tuple[str, str, str]  # package, file in it, class
SOURCES: dict[str, tuple[str, tuple[_Source, ...]]] = {
    "lora": (
        "peft.LoraConfig",
        (
            ("peft", "config.py", "PeftConfigMixin"),
            ("peft", "config.py", "PeftConfig"),
            ("peft", "tuners/lora/config.py", "LoraConfig"),
        ),
    ),
    "engine": (
        "vllm.AsyncEngineArgs",
        (("vllm", "engine/arg_utils.py", "EngineArgs"), ("vllm", "engine/arg_utils.py", "AsyncEngineArgs")),
    ),
    "trainer": (
        "trl.GRPOConfig",
        (
            ("transformers", "training_args.py", "TrainingArguments"),
            ("trl", "trainer/base_config.py", "_BaseConfig"),
            ("trl", "trainer/grpo_config.py", "GRPOConfig"),
        ),
    ),
    "sft": (
        "trl.SFTConfig",
        (
            ("transformers", "training_args.py", "TrainingArguments"),
            ("trl", "trainer/base_config.py", "_BaseConfig"),
            ("trl", "trainer/sft_config.py", "SFTConfig"),
        ),
    ),
}
"""The dataclass of each section, its bases first."""

_PLAIN: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}
_GENERIC: dict[str, Any] = _PLAIN | {"Union": Union}


def problems(section: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key of `values` that is wrong, and what is wrong with it."""
    library, sources = SOURCES[section]
    known = fields(sources) if values else {}
    for key, value in for_library(section, values).items() if known else ():
        if key not in known:
            yield key, unknown(key, list(known), library)
            continue
        try:
            convert(value, known[key], library)
        except ValueError as error:
            yield key, str(error)


@cache
def fields(sources: tuple[_Source, ...]) -> dict[str, Any]:
    """The arguments of a dataclass and their types, `Any` for one that is not plain; none where a source is not found."""
    result: dict[str, Any] = {}
    for package, file, name in sources:
        found = _class(package, file, name)
        if found is None:
            return {}
        for statement in found.body:
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and _is_argument(statement)
            ):
                result[statement.target.id] = _type(statement.annotation)
    return result


def _class(package: str, file: str, name: str) -> ast.ClassDef | None:
    spec = PathFinder.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / file
        if path.is_file():
            source = path.read_text(encoding="utf-8")
            try:
                body = ast.parse(_without_methods(source, name)).body
            except SyntaxError:  # not formatted as is usual
                body = ast.parse(source).body
            return next((one for one in body if isinstance(one, ast.ClassDef) and one.name == name), None)
    return None


def _without_methods(source: str, name: str) -> str:
    """The class alone, its fields and docstring: a tenth of vLLM's file, which takes a tenth of a second to parse."""
    end = r"(?=^{0}[^\s)]|\Z)"
    found = re.search(rf"^class {name}\b.*?{end.format('')}", source, re.MULTILINE | re.DOTALL)
    methods = rf"^    (?:@|def |async def ).*?{end.format(' {0,4}')}"
    return "" if found is None else re.sub(methods, "", found[0], flags=re.MULTILINE | re.DOTALL)


def _is_argument(statement: ast.AnnAssign) -> bool:
    if "ClassVar" in ast.unparse(statement.annotation):
        return False
    options = statement.value.keywords if isinstance(statement.value, ast.Call) else []
    return not any(option.arg == "init" and ast.literal_eval(option.value) is False for option in options)


def _type(annotation: ast.expr) -> Any:
    try:
        return _plain_type(annotation)
    except (KeyError, TypeError):
        return Any


def _plain_type(node: ast.expr) -> Any:
    """
    Raises:
        KeyError, TypeError: it is not made of Python's own types alone.
    """
    match node:
        case ast.Constant(None):
            return NoneType
        case ast.Constant(str(text)):
            return _plain_type(ast.parse(text, mode="eval").body)
        case ast.Name(name):
            return _PLAIN[name]
        case ast.BinOp(left, ast.BitOr(), right):
            return Union[_plain_type(left), _plain_type(right)]  # noqa: UP007 - computed
        case ast.Subscript(ast.Name("Optional"), inner):
            return Union[_plain_type(inner), None]  # noqa: UP007
        case ast.Subscript(ast.Name("Literal"), inner):
            return Literal[ast.literal_eval(inner)]
        case ast.Subscript(ast.Name(name), ast.Tuple(parts)):
            return _GENERIC[name][tuple(_plain_type(part) for part in parts)]
        case ast.Subscript(ast.Name(name), inner):
            return _GENERIC[name][_plain_type(inner)]
    raise KeyError(ast.dump(node))
