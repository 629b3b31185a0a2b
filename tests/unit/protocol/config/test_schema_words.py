"""Types in words. What they say is in docs/configuration.md, which the tests of the documentation compare, and in refusals."""

from typing import Any

import pytest

from protocol.config import run as schema
from protocol.config.section import is_compound, type_in_words


@pytest.mark.parametrize("annotation", [bytes, tuple[int, int], set[int]])
def test_a_type_without_words_is_noticed(annotation: Any) -> None:
    with pytest.raises((KeyError, ValueError)):
        type_in_words(annotation)


def test_the_schema_s_compound_fields_are_known() -> None:
    found = {
        f"{name}.{key}"
        for name, section in schema.RunConfig.model_fields.items()
        for key, field in getattr(section.annotation, "model_fields", {}).items()
        if is_compound(field.annotation)
    }
    assert found == {"pipeline.trainer_tokens_per_micro_batch", "environment.branch_after_turns"}
