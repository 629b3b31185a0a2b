"""Reward functions of Python code, as a configuration names them: by a file or module, which other processes can import.

Guarantee: the named function is the given one. A function that no other process can import is written to a file where its source
says all that it needs, which is itself and imports. Every other one is refused with the fix.
"""

import ast
import builtins
import hashlib
import importlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from protocol.errors import ConfigError
from protocol.runtime.files import staged

Reward = str | Callable[..., Any]

_FIX = "Write it to a file, in a notebook with `%%writefile rewards.py`, and give 'rewards.py:{}'"


def place_of(reward: Reward, folder: Path, home: Path) -> str:
    """Return the `file.py:name` or `module:name` of a reward; a string is one already, or names a plugin.

    Args:
        folder: for files of functions that cannot be imported; made when it is needed.
        home: the working directory of the daemons.
    """
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    if not isinstance(reward, FunctionType) or not name.isidentifier() or reward.__qualname__ != name:
        raise _refusal(name, "it is no function that was defined by `def` at the top of a file or cell")
    module = sys.modules.get(reward.__module__)
    if module is None or reward.__module__ == "__main__" or getattr(module, name, None) is not reward:
        return f"{_written(reward, folder)}:{name}"
    if module.__package__ or not (module.__file__ or "").endswith(".py"):
        package = reward.__module__.partition(".")[0]
        if not _is_found(package, home):
            raise _refusal(
                name, f"Python does not find `{package}` from {home}; install it, or let PYTHONPATH name its folder"
            )
        return f"{reward.__module__}:{name}"
    return f"{Path(str(module.__file__)).resolve()}:{name}"


def _is_found(package: str, home: Path) -> bool:
    """Ask another process, which has not what this one may have added to its path."""
    code = "import sys, importlib.util as u; sys.path[:0] = ['']; sys.exit(not u.find_spec(sys.argv[1]))"
    return (
        subprocess.run([sys.executable, "-P", "-c", code, package], cwd=home, stderr=subprocess.DEVNULL).returncode == 0
    )


def _written(function: FunctionType, folder: Path) -> Path:
    """Write the function with its imports to a file of its own, whose name has the digest of its text."""
    text = _text(function)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    file = folder.absolute() / f"{function.__name__}_{digest}.py"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with staged(file) as partial:
            partial.write_text(text, encoding="utf-8")
    return file


def _text(function: FunctionType) -> str:
    name = function.__name__
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (defined,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        raise _refusal(name, "its source is not known") from None
    if not isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef) or defined.name != name:
        raise _refusal(name, "its source is not one `def` of this name")
    if function.__closure__:
        raise _refusal(name, f"it uses `{function.__code__.co_freevars[0]}` of the function around it")
    if function.__dict__:
        raise _refusal(name, "it has attributes")
    imports = sorted(_import_of(function, used) for used in _globals_of(function, defined))
    return "\n".join([*imports, *(["", ""] if imports else []), source])


def _globals_of(function: FunctionType, defined: ast.AST) -> Iterator[str]:
    """Yield the names in the source that are not its own. One that is also a local name somewhere in it counts."""
    used = {node.id for node in ast.walk(defined) if isinstance(node, ast.Name)}
    used |= {name for node in ast.walk(defined) if isinstance(node, ast.Global) for name in node.names}
    for name in sorted(used & function.__globals__.keys()):
        if name != function.__name__ and function.__globals__[name] is not getattr(builtins, name, None):
            yield name


def _import_of(function: FunctionType, name: str) -> str:
    """Return the statement that imports a global name as what it is; `ConfigError` if there is none."""
    value = function.__globals__[name]
    if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value and value.__name__ != "__main__":
        return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    place, real = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if isinstance(place, str) and isinstance(real, str) and place != "__main__" and real.isidentifier():
        module = sys.modules.get(place) or importlib.import_module(place)
        if getattr(module, real, None) is value:
            return f"from {place} import {real}" + ("" if real == name else f" as {name}")
    raise _refusal(function.__name__, f"it uses `{name}`, which is defined beside it and not imported")


def _refusal(name: str, why: str) -> ConfigError:
    shown = name if name.isidentifier() else "NAME"
    return ConfigError(f"rewards: {name} cannot be imported by the reward workers: {why}. {_FIX.format(shown)}")
