"""Hypothesis strategies for every message type, derived from the structs, so that a new field is covered by itself."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from protocol.wire.messages import Message
from protocol.wire.schemas import READABLE_SCHEMAS, SCHEMA_VERSION, SINCE, SINCE_MESSAGES

MESSAGE_TYPES: tuple[type, ...] = Message.__args__

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)


def of(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Values that `info` allows, its bounds included."""
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: of(field.type) for field in fields})
        case inspect.UnionType(types=types):
            return st.one_of(*map(of, types))
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.StrType(pattern=pattern) if pattern:
            return st.text("0123456789abcdef", min_size=64, max_size=64)
        case inspect.StrType(min_length=shortest, max_length=longest):
            return st.text(min_size=shortest or 0, max_size=min(longest or 12, 12))
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, high)
        case inspect.FloatType(ge=low, gt=above, le=high):
            return st.floats(low if low is not None else above, high, exclude_min=above is not None)
        case inspect.ListType(item_type=item):
            return st.lists(of(item), max_size=3)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of(key), of(value), max_size=3)
        case inspect.BytesType():
            return st.binary(max_size=64)
        case inspect.AnyType():
            return anything
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
    raise NotImplementedError(info)


def messages_of(kind: type) -> st.SearchStrategy[Any]:
    return of(inspect.type_info(kind))


any_message = st.sampled_from(MESSAGE_TYPES).flatmap(messages_of)


def body_of(message: Any, schema_version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """The message in that schema as plain Python, as any msgpack library sees it."""
    body = msgspec.to_builtins(message, builtin_types=(bytes,))
    return {name: value for name, value in body.items() if name not in _newer(type(message), schema_version)}


def as_of(schema_version: int, message: Any) -> Any:
    """What arrives of `message` in that schema: newer fields have their defaults."""
    newer = _newer(type(message), schema_version)
    defaults = {field.name: field.default for field in msgspec.structs.fields(type(message)) if field.name in newer}
    return msgspec.structs.replace(message, **defaults)


def has(schema_version: int, kind: type) -> bool:
    return SINCE_MESSAGES.get(kind, 1) <= schema_version


def schemas_of(kind: type) -> st.SearchStrategy[int]:
    """Those that this release speaks and that have messages of this kind."""
    return st.sampled_from([version for version in READABLE_SCHEMAS if has(version, kind)])


def _newer(kind: type, schema_version: int) -> set[str]:
    return {name for name, since in SINCE.get(kind, {}).items() if since > schema_version}
