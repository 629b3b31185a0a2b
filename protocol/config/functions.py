"""Code that the configuration names: users' functions as `module:function` or `path/to/file.py:function`, and plugins by the
name of their entry point.

Guarantee: `load_function` returns a callable and `load_plugin` an object, or both raise `ConfigError` with the key, the place and
the reason; `DeviceError` where the code found a GPU without memory. A file is executed once, however many of its functions are
asked for, so they share what it loads and remembers. A user's file may have the name of one of our packages; code that imports it
by that name is refused with the fix, because it would get our package.
"""

import ast
import difflib
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, DeviceError, is_device_failure

PACKAGES = ("protocol", "replay", "producer", "consumer", "slipstream", "slipstream_extras")
ENVIRONMENT_PLUGINS = "slipstream.environments"
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""The arguments of every call of a reward function, beside columns."""
_ROOT = Path(__file__).resolve().parents[2]


def is_plugin(place: str) -> bool:
    """Return whether `place` names a plugin by its entry point, and not code of the user's by file or module."""
    return ":" not in place


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """Import the function `spec` of configuration key `key`. It and its imports are looked up in the working directory first."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"{key}: {spec}: there is no file {place} (looked from {Path.cwd()})")
    try:
        sys.path[:0] = [] if "" in sys.path else [""]  # before our own: what this process needs of ours is loaded
        module = _load_file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        _refuse_our_names(f"{key}: {spec}", error)
        raise _import_failed(f"{key}: {spec}: importing {place}", error) from error
    _refuse_our_names(f"{key}: {spec}")
    function = getattr(module, name, None)
    if function is None:
        hint = (
            f"; it is a package of Slipstream, so write {place}.py:{name}, or rename yours" if place in PACKAGES else ""
        )
        if close := difflib.get_close_matches(name, vars(module), n=1):
            hint = hint or f"; did you mean `{close[0]}`?"
        raise ConfigError(f"{key}: {spec}: {place} has no `{name}`{hint}")
    if not callable(function):
        raise ConfigError(f"{key}: {spec}: `{name}` is not a function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _refuse_our_names(place: str, error: Exception | None = None) -> None:
    """Raise ConfigError if a loaded file of the working directory imports another one by the name of one of our packages. `error`
    has the files whose import failed."""
    taken = {name for name in PACKAGES if Path(f"{name}.py").is_file()}
    loaded = [getattr(module, "__file__", None) for module in [*sys.modules.values()]] if taken else []
    failed = [frame.filename for frame in traceback.extract_tb(error.__traceback__)] if taken and error else []
    here, files = Path.cwd(), {name for name in [*loaded, *failed] if name}
    folders = {one for one in {os.path.dirname(name) for name in files} if Path(one).resolve().is_relative_to(here)}
    for file in [Path(name) for name in files if os.path.dirname(name) in folders]:
        if file.is_file() and not any(file.is_relative_to(_ROOT / one) for one in PACKAGES):
            for name in taken.intersection(_imported_by(file)):
                raise ConfigError(
                    f"{place}: {file} imports `{name}`, which is a package of Slipstream and not {here / name}.py; "
                    "give your file another name"
                )


def _imported_by(file: Path) -> Iterator[str]:
    """Yield the top-level packages that a file imports."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):  # a shared library, or no Python
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def load_plugin(group: str, name: str, key: str) -> Any:
    """Import the plugin that configuration key `key` names: the entry point `name` of `group`."""
    entry = _entry_point(group, name, key)
    try:
        return entry.load()
    except Exception as error:
        raise _import_failed(f"{key}: {name}: importing {entry.value}", error) from error


def installed_plugin(group: str, name: str) -> Any | None:
    """Import a part that a run can do without; None where its package is not installed."""
    entry = next(iter(entry_points(group=group, name=name)), None)
    try:
        return entry and entry.load()
    except ModuleNotFoundError as error:
        if entry is not None and error.name == entry.module.partition(".")[0]:
            return None
        raise


def _entry_point(group: str, name: str, key: str) -> EntryPoint:
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        raise ConfigError(
            f"{key}: no installed package has an entry point `{name}` in the group {group}; it has "
            f"{', '.join(sorted(installed)) or 'none'}. Use one of these, or install the package of the plugin"
        )
    return installed[name]


def make_plugin(group: str, name: str, options: dict[str, Any], key: str) -> Any:
    """Call the plugin with its options. Raise ConfigError with the key and the reason if that fails."""
    plugin = load_plugin(group, name, key)
    try:
        return plugin(**options)
    except (ConfigError, DeviceError):
        raise
    except Exception as error:
        raise ConfigError(f"{key}: plugin {name} with these options raised {type(error).__name__}: {error}") from error


def plugin_module(group: str, name: str) -> str | None:
    """Return the module of an installed plugin, without importing it."""
    return next((entry.module for entry in entry_points(group=group, name=name)), None)


def plugin_place(group: str, name: str, key: str) -> tuple[str, str]:
    """Return the folder that has the plugin's module or package, and the plugin as `module:name`. Nothing is imported, so that
    another Python can load it."""
    entry = _entry_point(group, name, key)
    found = importlib.util.find_spec(entry.module.partition(".")[0])
    if found is None or not (found.submodule_search_locations or found.origin):
        raise ConfigError(f"{key}: {name}: there is no module {entry.module}; install the package of the plugin again")
    package = [*(found.submodule_search_locations or [])] or [str(found.origin)]
    return str(Path(package[0]).resolve().parent), f"{entry.module}:{entry.attr}"


def check_plugin(group: str, name: str, shipped: Iterable[str], what: str) -> None:
    """Raise ValueError with the names that are installed, unless `name` is one. `shipped` are those of Slipstream itself."""
    shipped = set(shipped)
    if name not in shipped and name not in (installed := entry_points(group=group).names):
        known = sorted(shipped | installed)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{close[0]}`? No" if close else "no"
        raise ValueError(
            f"{hint} installed package has a plugin `{name}` in the entry points {group}; installed: {', '.join(known)}. {what}"
        )


def _import_failed(what: str, error: Exception) -> ConfigError | DeviceError:
    kind = DeviceError if is_device_failure(error) else ConfigError
    return kind(f"{what} failed: {type(error).__name__}: {error}")


@functools.cache
def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"slipstream_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
