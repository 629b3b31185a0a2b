"""Code that the configuration names: users' functions as `module:function` or `path/to/file.py:function`, and plugins by the
name of their entry point.

Guarantee: `load_function` returns a callable and `load_plugin` an object, or both raise `ConfigError` with the key, the place and
the reason; `DeviceError` where the code found a GPU without memory. A file is executed once, however many of its functions are
asked for, so they share what it loads and remembers.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, DeviceError, is_device_failure

PACKAGES = ("protocol", "replay", "producer", "consumer", "slipstream")


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """Imports the function `spec` of configuration key `key`. Modules are looked up in the working directory first, also those
    that it imports."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"{key}: {spec}: there is no file {place} (looked from {Path.cwd()})")
    try:
        sys.path[:0] = [] if "" in sys.path else [""]  # before our own: what this process needs of ours is loaded
        module = _load_file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise _import_failed(f"{key}: {spec}: importing {place}", error) from error
    function = getattr(module, name, None)
    if function is None:
        hint = "; it is a package of Slipstream, so give yours another name, or its file" if place in PACKAGES else ""
        raise ConfigError(f"{key}: {spec}: {place} has no `{name}`{hint}")
    if not callable(function):
        raise ConfigError(f"{key}: {spec}: `{name}` is not a function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def load_plugin(group: str, name: str, key: str) -> Any:
    """Import the plugin that configuration key `key` names: the entry point `name` of `group`."""
    entry = _entry_point(group, name, key)
    try:
        return entry.load()
    except Exception as error:
        raise _import_failed(f"{key}: {name}: importing {entry.value}", error) from error


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
    known = sorted({*shipped, *entry_points(group=group).names})
    if name not in known:
        raise ValueError(
            f"no installed package has a plugin `{name}` in the entry points {group}; installed: {', '.join(known)}. {what}"
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
