"""Collects all mistakes of a configuration at once, each with its key and in our words.

Guarantee: `collected` goes on after a mistake with the value left out. A contradiction that may only follow from a value that was
left out is not reported.
"""

import copy
import functools
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from protocol.config import trainer_keys
from protocol.config.other_names import instead_of, parts_of
from protocol.config.section import COLLECT, Problems, Section, expected, is_compound, is_section, nearest
from protocol.errors import ConfigError, SlipstreamError

Place = tuple[str | int, ...]
"""The way to a value: names of keys, and numbers of parts of a list."""
_ROUNDS = 20
_LENGTHS = {
    "string_too_short": ("min_length", "at least {} characters"),
    "string_too_long": ("max_length", "at most {} characters"),
    "too_short": ("min_length", "a list of at least {} parts"),
    "too_long": ("max_length", "a list of at most {} parts"),
}


class Mistake(NamedTuple):
    """Say what is wrong with one key.

    Attributes:
        kind: the error that ends a command for it.
        names_key: whether the text names the key, and `place` is of its section.
    """

    place: Place
    text: str
    kind: type[SlipstreamError] = ConfigError
    names_key: bool = False

    @property
    def key(self) -> str:
        return dotted(self.place)


def dotted(place: Place) -> str:
    return ".".join(map(str, place))


def words_of(text: str) -> list[str]:
    """Return what may be keys in the first clause of a text, or stands in it as one: `a.b`, or before `=`."""
    clause = re.split(r"[:;,](?: |$)", text, maxsplit=1)[0]
    others = re.findall(r"[A-Za-z_]\w*(?:\.\w+)+|[A-Za-z_]\w*(?==)|(?<=`)[A-Za-z_][\w.]*(?=[`:])", text)
    return re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", clause) + others


class Collected(NamedTuple):
    """A configuration as far as it can be read. `left_out` are keys whose values it does not have."""

    made: Any
    mistakes: list[Mistake]
    left_out: list[str]

    def depends(self, key: str) -> bool:
        """Return whether a key, one below it or one above it was left out."""
        return any(f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.") for one in self.left_out)


def collected(schema: type[BaseModel], values: dict[str, Any]) -> Collected:
    """Validate `values`, and return all that is wrong with them."""
    values = copy.deepcopy(values)
    result = Collected(None, [], [])
    for _ in range(_ROUNDS):
        try:
            made = schema.model_validate(values, context=COLLECT)
        except ValidationError as error:
            for problem in error.errors():
                mistake = explained(problem, schema)
                if not result.depends(mistake.key):
                    parts = parts_of(mistake.key, problem["input"]) if problem["type"] == "extra_forbidden" else ()
                    others = [Mistake(tuple(name.split(".")), f"unknown key; {hint}") for name, hint in parts]
                    result.mistakes.extend(others or [mistake])
                _leave_out(values, mistake.place, problem["type"] == "missing", schema, result.left_out)
        else:
            result = result._replace(made=made)
            break
    if isinstance(result.made, Section):
        result.mistakes.extend(_contradictions(result))
    return result


def _contradictions(result: Collected) -> Iterator[Mistake]:
    problems = result.made.all_problems()
    while True:
        try:
            place, text = next(problems)
        except StopIteration:
            return
        except Exception:
            if not result.mistakes:  # else a rule met what another one refuses
                raise
            return
        sections = (dotted(place[:depth]) for depth in range(len(place) + 1))
        keys = {f"{section}.{word}".lstrip(".") for section in sections for word in words_of(text)}
        beside = {one.rpartition(".")[2] for one in result.left_out if one.rpartition(".")[0] == dotted(place)}
        if not any(map(result.depends, keys)) and beside.isdisjoint(re.findall(r"\w+", text)):
            named = re.match(r"`([\w.]+)[`:]", text)  # a key inside a section that belongs to a library
            yield Mistake((*place, *named[1].split(".")) if named else place, text, names_key=True)


def _leave_out(values: Any, place: Place, is_missing: bool, schema: type[BaseModel], left_out: list[str]) -> None:
    """Take the value at `place` away; put an empty one where one is missing. A part of a list takes its list with it, so that
    the others keep their numbers."""
    holder, holders = values, []
    for part in place:
        holders.append(holder)
        holder = _part(holder, part)
        if holder is None:
            break
    depth = len(holders) - 1
    if is_missing and depth == len(place) - 1 and isinstance(holders[-1], dict):
        holders[-1][place[-1]] = {} if is_section(_annotation(schema, place)) else ""
        left_out.append(dotted(place))
        return
    while depth > 0 and not (isinstance(holders[depth], dict) and place[depth] in holders[depth]):
        depth -= 1
    holders[depth].pop(place[depth], None)
    left_out.append(dotted(place[: depth + 1]))


def _part(holder: Any, part: str | int) -> Any:
    if isinstance(holder, dict):
        return holder.get(part)
    return holder[part] if isinstance(holder, list) and isinstance(part, int) and part < len(holder) else None


def explained(problem: Any, schema: type[BaseModel]) -> Mistake:
    """Return pydantic's problem in our words."""
    place = tuple(part for part in problem["loc"] if part != "[key]")
    kind, given = problem["type"], problem["input"]
    depth, field = _compound_field(place, schema)
    place = place[:depth] if field is not None else place
    if kind == "extra_forbidden":
        valid = _names(place[:-1], schema)
        otherwise = f"valid: {', '.join(valid) or 'none'}"
        hint = instead_of(dotted(place[:-1]), str(place[-1]), dict.fromkeys(valid), places_of_keys(schema), otherwise)
        return Mistake(place, f"unknown key `{place[-1]}`; {hint}")
    if kind == "missing" and field is None:
        return Mistake(place, "required, but not given")
    text = _text(problem, place, field, schema)
    if isinstance(given, str | int | float | bool) or given is None or len(str(given)) < 80:
        text += f" (got {given!r})"
    return Mistake(place, text)


def _text(problem: Any, place: Place, field: FieldInfo | None, schema: type[BaseModel]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return str(problem["msg"]).removeprefix("Value error, ")
    if kind == "finite_number":
        return "expected a finite number"
    if kind == "invalid_key" or "[key]" in problem["loc"]:
        return "the name of a key must be text; put it in quotes"
    if kind in _LENGTHS:
        name, words = _LENGTHS[kind]
        return f"expected {words.format(context[name])}".replace("at least 1 characters", "text that is not empty")
    annotation = field.annotation if field is not None else _annotation(schema, place)
    constraints = field.metadata if field is not None else _constraints(schema, place)
    hint = ""
    if kind == "literal_error" and isinstance(problem["input"], str):
        hint = nearest(problem["input"], re.findall(r"'([^']*)'", context["expected"]), "")
    if kind in ("model_type", "dict_type") and isinstance(problem["input"], str):  # YAML takes `key:value` as one text
        glued = re.match(r"([\w.]+:)\S", problem["input"])
        hint = f"a space is missing after `{glued[1]}`" if glued else ""
    return expected(annotation, constraints) + (f"; {hint}" if hint else "")


@functools.cache
def places_of_keys(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Return the places of all keys of the sections of a schema, and of TRL's that work, by their names."""
    places: dict[str, list[str]] = {}
    for name, field in schema.model_fields.items():
        working = [key for keys in trainer_keys.WORKS.values() for key in keys] if name == "trainer" else []
        for key in [*getattr(_section(field.annotation), "model_fields", ()), *working]:
            places.setdefault(key, []).append(f"{name}.{key}")
    return places


def option_problems(name: str, schema: type[Section], options: dict[str, Any]) -> Problems:
    """Yield what is wrong with the options of a plugin."""
    for mistake in collected(schema, options).mistakes:
        text = mistake.text + ("" if mistake.text.endswith("?") else ".")
        takes = ", ".join(schema.model_fields) or "no options"
        yield f"{dotted(('options', *mistake.place))}: {text} {name} takes {takes}"


def _compound_field(place: Place, schema: Any) -> tuple[int, FieldInfo | None]:
    """The field on the way to `place` whose parts pydantic reports one by one, under names of its own below the
    field's; and how deep it is."""
    for depth, part in enumerate(place, start=1):
        if isinstance(part, int):
            continue
        field = schema.model_fields.get(part) if schema else None
        if field is None:
            break
        if is_compound(field.annotation):
            return depth, field
        schema = _section(field.annotation)
    return len(place), None


def _field(schema: Any, place: Place) -> tuple[FieldInfo | None, int]:
    """The deepest field on the way, and how many parts of the way are below it."""
    field, below = None, 0
    for part in place:
        deeper = schema.model_fields.get(part) if schema and isinstance(part, str) else None
        field, below = (deeper, 0) if deeper is not None else (field, below + 1)
        schema = _section(field.annotation) if field is not None else None
    return field, below


def _annotation(schema: Any, place: Place) -> Any:
    field, below = _field(schema, place)
    annotation = field.annotation if field is not None else Any
    for _ in range(below):  # parts of lists
        while get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        annotation = next(iter(get_args(annotation)), Any)
    return annotation


def _constraints(schema: Any, place: Place) -> list[Any]:
    field, below = _field(schema, place)
    return list(field.metadata) if field is not None and below == 0 else []


def _names(place: Place, schema: Any) -> list[str]:
    for part in place:
        if not isinstance(part, int):
            schema = _section(schema.model_fields[part].annotation)
    return list(schema.model_fields)


def _section(annotation: Any) -> Any:
    return next((part for part in (annotation, *get_args(annotation)) if is_section(part)), None)
