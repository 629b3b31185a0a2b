"""Types in words: what the configuration page and refusals say."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, create_model

from protocol.config import run as schema
from protocol.config.type_names import expected, is_compound, type_in_words


class Item(BaseModel):
    name: str


Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=0, le=6400)]

WORDS = [
    (str, "text"),
    (bool, "`true` or `false`"),
    (int, "integer"),
    (float, "number"),
    (dict[str, Any], "mapping"),
    (list[Item], "list of mappings"),
    (list[str], "list of text"),
    (str | None, "text or none"),
    (bool | None, "`true` or `false`, or none"),
    (Literal["one"], "`one`"),
    (Literal["one", "two"], "`one` or `two`"),
    (Literal["one", "two", "three"], "`one`, `two` or `three`"),
    (Annotated[int, Field(ge=1)], "integer >= 1"),
    (Annotated[float, Field(gt=0, le=1e9)], "number > 0"),
    (Share, "number > 0 and < 1"),
    (Count, "integer from 0 to 6,400"),
    (Share | None, "number > 0 and < 1, or none"),
    (Count | Literal["auto"], "integer from 0 to 6,400, or `auto`"),
    (tuple[Count, Count], "two integers from 0 to 6,400"),
    (tuple[float, float, float], "three numbers"),
]


@pytest.mark.parametrize(("annotation", "words"), WORDS, ids=[words for _, words in WORDS])
def test_types_in_words(annotation: Any, words: str) -> None:
    assert type_in_words(annotation) == words
    field = create_model("Section", key=annotation).model_fields["key"]  # pydantic takes bounds out of the annotation
    assert type_in_words(field.annotation, field.metadata) == words


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Count | Literal["auto"], "expected an integer from 0 to 6,400, or `auto`"),
        (Share, "expected a number > 0 and < 1"),
        (list[Item], "expected a list of mappings"),
        (tuple[int, int], "expected two integers"),
        (str | None, "expected text or none"),
    ],
)
def test_a_refusal_in_words(annotation: Any, words: str) -> None:
    assert expected(annotation) == words


@pytest.mark.parametrize("annotation", [bytes, tuple[int, str], set[int]])
def test_a_type_without_words_is_noticed(annotation: Any) -> None:
    with pytest.raises((KeyError, ValueError)):
        type_in_words(annotation)


def test_what_pydantic_reports_in_parts() -> None:
    for annotation in (int | Literal["auto"], tuple[int, int], int | str | None):
        assert is_compound(annotation)
    for annotation in (int, int | None, Share | None, Literal["a", "b"], list[Item], dict[str, Any]):
        assert not is_compound(annotation)


def test_the_schema_s_compound_fields_are_known() -> None:
    found = {
        f"{name}.{key}"
        for name, section in schema.RunConfig.model_fields.items()
        for key, field in getattr(section.annotation, "model_fields", {}).items()
        if is_compound(field.annotation)
    }
    assert found == {"pipeline.max_staleness", "pipeline.auto_staleness"}
