"""User functions named in the configuration as `module:function` or `path/to/file.py:function`.

Guarantee: `load_function` returns a callable or raises `ConfigError` with the key, the place and the reason; `DeviceError` where
the code found a GPU without memory. A file is executed once, however many of its functions are asked for, so they share what it
loads and remembers.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
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
        kind = DeviceError if is_device_failure(error) else ConfigError
        raise kind(f"{key}: {spec}: importing {place} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        hint = "; it is a package of Slipstream, so give yours another name, or its file" if place in PACKAGES else ""
        raise ConfigError(f"{key}: {spec}: {place} has no `{name}`{hint}")
    if not callable(function):
        raise ConfigError(f"{key}: {spec}: `{name}` is not a function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


@functools.cache
def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"slipstream_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
