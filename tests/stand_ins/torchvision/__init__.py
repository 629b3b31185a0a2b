"""Takes the place of torchvision where it is not installed, as beside a CPU build of torch, for which PyPI has none.

Guarantee: what vLLM and transformers import from it is there. They use it for images alone, and no test shows them one.
"""

import enum
import sys
import types
from typing import Any

__version__ = "0.0"

InterpolationMode = enum.Enum(
    "InterpolationMode", ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]
)


class _Empty(types.ModuleType):
    """A module in which every name is a class of its own."""

    __path__: list[str] = []
    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_name}"] = _Empty(f"{__name__}.{_name}")
    _parent, _, _leaf = f"{__name__}.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _leaf, sys.modules[f"{__name__}.{_name}"])
