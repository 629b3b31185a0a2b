"""Reads how long the completions of a prompt may be: `sampling.max_completion_length_column`.

Guarantee: a limit is the row's own and no more than `sampling.max_completion_length`, which is that of a row without one. A value
that is no limit is an error with its column, and the prompt fails alone.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.config.data import SamplingSection
from protocol.errors import DatasetError
from protocol.wire.answers import text_of_value
from protocol.wire.messages import Sampling


@dataclass(frozen=True)
class CompletionLimit:
    """The limits of rows by their `column` (None: all have `longest`)."""

    column: str | None
    longest: int

    @classmethod
    def of_run(cls, section: SamplingSection) -> "CompletionLimit":
        return cls(section.max_completion_length_column, section.max_completion_length)

    def of(self, columns: dict[str, Any]) -> int:
        """Raise DatasetError if the row's value is no integer from 1 on."""
        value = None if self.column is None else columns.get(self.column)
        if value is None or value == "":
            return self.longest
        try:
            limit = int(text_of_value(value, str(self.column)))
        except ValueError:
            limit = 0
        if limit < 1:
            raise DatasetError(
                f"sampling.max_completion_length_column: {self.column!r} has {value!r:.80}; expected an integer from 1 on"
            )
        return min(limit, self.longest)

    def within(self, sampling: Sampling, columns: dict[str, Any]) -> Sampling:
        """Return the sampling of a row's lease."""
        return msgspec.structs.replace(sampling, max_completion_length=self.of(columns))
