"""The prompt dataset: prompts by id, each with the columns that its rewards need.

Guarantee: a dataset that opened has at least one row, and the first row of each source has a usable prompt; a later row that
has none is refused alone, with its number. Ids stay the same at every start as long as `digest` does.
"""

import hashlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from consumer.prompts.filters import TokenLimit, Verdict, first_unusable, in_words, verdicts
from consumer.prompts.mixture import Mixture
from consumer.prompts.rows import RowReader
from consumer.prompts.sources import load_rows, rows_digest
from consumer.prompts.tokenizer import load_tokenizer
from protocol.config.sections.dataset import DatasetSection, SourceSection
from protocol.errors import DatasetError
from protocol.wire.digests import tokenizer_digest

logger = logging.getLogger(__name__)

MOST_PROMPTS = 100_000_000
"""Of an epoch. More come of weights that no row count fits."""


class PromptDataset:
    """See the module's guarantee.

    Args:
        model_folder: whose tokenizer counts the tokens of prompts; needed with `max_prompt_tokens`.
        trust_remote_code: whether that tokenizer may be made of files of its own.

    Raises:
        DatasetError: no such dataset or split, no rows, no prompt in the first row, or the filter raised.
        ConfigError: a function that the section names cannot be imported.
    """

    def __init__(
        self, section: DatasetSection, model_folder: Path | None = None, *, trust_remote_code: bool = False
    ) -> None:
        limit = _limit(section, model_folder, trust_remote_code)
        self._sources = [_Source(source, key, limit) for key, source in section.all_sources.items()]
        weights = [source.weight for source in section.all_sources.values()]
        given = [weight for weight in weights if weight is not None]
        self._mixture = Mixture([len(source) for source in self._sources], given or None)
        if len(self._mixture) > MOST_PROMPTS:
            raise DatasetError(
                f"dataset.sources: with these weights an epoch has {len(self._mixture):,} prompts, because every row comes at "
                f"least once; bring the weights closer to the numbers of rows ({self._describe(self._mixture.counts)})"
            )
        parts = [f"{source.digest} {weight}" for source, weight in zip(self._sources, weights, strict=True)]
        self.digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        """64 hex digits that change with the rows, with what is skipped and with the files of the functions."""
        if len(self._sources) > 1:
            logger.info("dataset: %d prompts: %s", len(self), self._describe(self._mixture.counts))

    def __len__(self) -> int:
        return len(self._mixture)

    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        """The prompt (a string or a list of messages) and all other columns of one row.

        Raises:
            DatasetError: the transform raised, or the row has no usable prompt.
        """
        source, row = self._mixture[prompt_id]
        return self._sources[source][row]

    def place(self, prompt_id: int) -> str:
        """Row and dataset of a prompt, for messages."""
        source, number = self.locate(prompt_id)
        return self.readers[source].place(number)

    @property
    def readers(self) -> list[RowReader]:
        """Of the sources, in their order."""
        return [source.reader for source in self._sources]

    def locate(self, prompt_id: int) -> tuple[int, int]:
        """The index of a prompt's reader, and the number of its row there."""
        source, row = self._mixture[prompt_id]
        return source, self._sources[source].number(row)

    def _describe(self, counts: list[int]) -> str:
        return ", ".join(
            f"{count} of {source.path} ({len(source)} rows)"
            for count, source in zip(counts, self._sources, strict=True)
        )


class _Source:
    """The rows of one source that were not skipped."""

    def __init__(self, section: SourceSection, key: str, limit: TokenLimit | None) -> None:
        self.path = section.path
        rows = load_rows(section, key)
        self.reader = RowReader(section, key, rows)
        self._kept: np.ndarray | None = None
        self.digest = f"{rows_digest(rows)} {self.reader.code_digest()}"
        if limit is not None or self.reader.may_skip:
            found = verdicts(self.reader, limit, self.digest)
            self._kept = np.flatnonzero((found == Verdict.KEPT) | (found == Verdict.UNUSABLE))
            self._say(key, found, in_words(found, limit))
            self.digest += f" {limit.identity if limit else ''}"
        self[0]

    def __len__(self) -> int:
        return len(self.reader.rows) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        return self.reader[self.number(index)]

    def number(self, index: int) -> int:
        return index if self._kept is None else int(self._kept[index])

    def _say(self, key: str, found: np.ndarray, skipped: str) -> None:
        if len(self) == 0:
            raise DatasetError(f"{key}: all {len(found)} rows of {self.path} are skipped: {skipped}")
        if skipped:
            logger.info("%s: %d of the %d rows of %s are used; %s", key, len(self), len(found), self.path, skipped)
        unusable = int((found == Verdict.UNUSABLE).sum())
        if unusable:
            why = first_unusable(self.reader, found)
            logger.warning("%s: %d rows cannot be used and will each be refused; the first: %s", key, unusable, why)


def _limit(section: DatasetSection, model_folder: Path | None, trust_remote_code: bool) -> TokenLimit | None:
    if section.max_prompt_tokens is None:
        return None
    assert model_folder is not None, "whoever opens a dataset with max_prompt_tokens has the model"
    digest = tokenizer_digest(model_folder, trust_remote_code=trust_remote_code)
    load = partial(load_tokenizer, model_folder, trust_remote_code=trust_remote_code)
    return TokenLimit(section.max_prompt_tokens, load, digest, section.chat_template_kwargs)
