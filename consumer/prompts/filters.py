"""Which rows are left out before a run starts: those that the filter refuses, the transform skips or that are too long.

Guarantee: every row is judged once, in one pass that `datasets` keeps in its cache; the same rows, functions, tokenizer and
bound are not judged again at the next start. What is wrong with a single row does not keep it out: it is counted, and
refused alone when its turn comes.
"""

import hashlib
import logging
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from consumer.prompts.rows import Row, RowReader, rows_digest
from consumer.prompts.tokenizer import load_tokenizer
from protocol.config.data import DatasetSection
from protocol.errors import DatasetError
from protocol.wire.messages import prompt_token_ids
from protocol.wire.model_folder import tokenizer_digest

logger = logging.getLogger(__name__)


class Verdict(IntEnum):
    KEPT = 0
    FILTERED = 1
    TRANSFORMED_AWAY = 2
    TOO_LONG = 3
    UNUSABLE = 4


class TokenLimit:
    """The longest prompt."""

    def __init__(self, section: DatasetSection, model_folder: Path | None, trust_remote_code: bool) -> None:
        assert model_folder is not None, "whoever opens a dataset with max_prompt_tokens has the model"
        self._folder = model_folder
        self._trust_remote_code = trust_remote_code
        self._template = section.chat_template_kwargs
        self.max_tokens = section.max_prompt_tokens
        digest = tokenizer_digest(model_folder, trust_remote_code=trust_remote_code)
        self.identity = repr((self.max_tokens, digest, sorted(self._template.items())))

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._folder, trust_remote_code=self._trust_remote_code)

    def allows(self, prompt: Any) -> bool:
        return len(prompt_token_ids(self._tokenizer, prompt, self._template)) <= (self.max_tokens or 0)


def kept_rows(reader: RowReader, limit: TokenLimit | None) -> tuple[Sequence[int], str]:
    """The numbers of the rows that are not left out, which the log names, and a digest of all that they depend on. Raises
    DatasetError if none is left, or the filter raised."""
    digest, path = f"{rows_digest(reader.rows)} {reader.code_digest()}", reader.source.path
    if limit is None and reader.filter is None and reader.transform is None:
        return range(len(reader.rows)), digest
    digest += f" {limit.identity if limit else ''}"
    found = _verdicts(reader, limit, hashlib.sha256(digest.encode()).hexdigest())
    kept: Any = np.flatnonzero((found == Verdict.KEPT) | (found == Verdict.UNUSABLE))
    reasons = {
        Verdict.FILTERED: "refused by the filter",
        Verdict.TRANSFORMED_AWAY: "skipped by the transform",
        Verdict.TOO_LONG: f"longer than max_prompt_tokens={limit.max_tokens if limit else 0}",
    }
    counts = {reason: int((found == verdict).sum()) for verdict, reason in reasons.items()}
    skipped = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    if len(kept) == 0:
        raise DatasetError(f"{reader.key}: all {len(found)} rows of {path} are skipped: {skipped}")
    if skipped:
        logger.info("%s: %d of the %d rows of %s are used; %s", reader.key, len(kept), len(found), path, skipped)
    unusable = np.flatnonzero(found == Verdict.UNUSABLE)
    if len(unusable):
        why = _problem(reader, int(unusable[0]))
        text = "%s: %d rows cannot be used and will each be refused; the first: %s"
        logger.warning(text, reader.key, len(unusable), why)
    return kept, digest


def judge(reader: RowReader, limit: TokenLimit | None, row: Row, number: int) -> Verdict:
    """Raises DatasetError if the filter raised, or did not say."""
    if not reader.passes(row, number):
        return Verdict.FILTERED
    try:
        result = reader.read(row, number)
        if result is None:
            return Verdict.TRANSFORMED_AWAY
        if limit is not None and not limit.allows(result[0]):
            return Verdict.TOO_LONG
    except Exception:  # a chat template raises what it likes
        return Verdict.UNUSABLE
    return Verdict.KEPT


def _verdicts(reader: RowReader, limit: TokenLimit | None, key: str) -> np.ndarray:
    """One verdict per row, int8, with its key in the cache."""
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "slipstream"
    cache.mkdir(parents=True, exist_ok=True)
    judged = reader.rows.map(
        lambda row, number: {"verdict": judge(reader, limit, row, number)},
        with_indices=True,
        remove_columns=reader.rows.column_names,
        features=datasets.Features({"verdict": datasets.Value("int8")}),
        cache_file_name=str(cache / f"verdicts-{key}.arrow"),
        new_fingerprint=key,
    )
    return np.asarray(judged.data.column("verdict"), np.int8)


def _problem(reader: RowReader, number: int) -> str:
    """What is wrong with a row that cannot be used."""
    try:
        reader[number]
    except DatasetError as error:
        return str(error)
    return f"row {number}: the chat template refuses its messages"
