"""flash-attn's padding, which transformers imports and packed rows do not need."""

from typing import Any


def index_first_axis(*_: Any) -> Any:
    raise NotImplementedError("packed rows have no padding")


def pad_input(*_: Any) -> Any:
    raise NotImplementedError("packed rows have no padding")


def unpad_input(*_: Any) -> Any:
    raise NotImplementedError("packed rows have no padding")
