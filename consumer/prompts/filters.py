"""Which rows are left out before a run starts: those that the filter refuses, the transform skips or that are too long.

Guarantee: every row is judged once, in one pass that `datasets` keeps in its cache; the same rows, functions, tokenizer and
bound are not judged again at the next start. What is wrong with a single row does not keep it out: it is counted, and
refused alone when its turn comes.
"""

import hashlib
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from consumer.prompts.rows import Row, RowReader
from protocol.errors import DatasetError
from protocol.wire.prompts import prompt_token_ids

_BATCH_ROWS = 1000


class Verdict(IntEnum):
    KEPT = 0
    FILTERED = 1
    TRANSFORMED_AWAY = 2
    TOO_LONG = 3
    UNUSABLE = 4


class TokenLimit:
    """The longest prompt.

    Args:
        load_tokenizer: called when the first prompt has to be counted.
        tokenizer_digest: as of `protocol.wire.digests`.
    """

    def __init__(
        self,
        max_tokens: int,
        load_tokenizer: Callable[[], Any],
        tokenizer_digest: str,
        chat_template_kwargs: dict[str, Any],
    ) -> None:
        self.max_tokens = max_tokens
        self._load = load_tokenizer
        self._tokenizer: Any = None
        self._kwargs = chat_template_kwargs
        self.identity = repr((max_tokens, tokenizer_digest, sorted(chat_template_kwargs.items())))

    def allows(self, prompt: Any) -> bool:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return len(prompt_token_ids(self._tokenizer, prompt, self._kwargs)) <= self.max_tokens


def judge(reader: RowReader, limit: TokenLimit | None, row: Row, number: int) -> Verdict:
    """
    Raises:
        DatasetError: the filter raised, or did not say.
    """
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


def verdicts(reader: RowReader, limit: TokenLimit | None, digest: str) -> np.ndarray:
    """One verdict per row, int8.

    Args:
        digest: of everything that they depend on but the limit.
    """
    key = hashlib.sha256(f"{digest} {limit.identity if limit else ''}".encode()).hexdigest()
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "slipstream"
    cache.mkdir(parents=True, exist_ok=True)

    def judge_batch(columns: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[int]]:
        return {"verdict": [judge(reader, limit, row, n) for row, n in zip(_rows(columns), numbers, strict=True)]}

    judged = reader.rows.map(
        judge_batch,
        batched=True,
        batch_size=_BATCH_ROWS,
        with_indices=True,
        remove_columns=reader.rows.column_names,
        features=datasets.Features({"verdict": datasets.Value("int8")}),
        cache_file_name=str(cache / f"verdicts-{key}.arrow"),
        new_fingerprint=key,
    )
    return np.asarray(judged.data.column("verdict"), np.int8)


def in_words(found: np.ndarray, limit: TokenLimit | None) -> str:
    """What was skipped, with numbers; empty if nothing was."""
    reasons = {
        Verdict.FILTERED: "refused by the filter",
        Verdict.TRANSFORMED_AWAY: "skipped by the transform",
        Verdict.TOO_LONG: f"longer than max_prompt_tokens={limit.max_tokens if limit else 0}",
    }
    counts = {verdict: int((found == verdict).sum()) for verdict in reasons}
    return ", ".join(f"{counts[verdict]} {reason}" for verdict, reason in reasons.items() if counts[verdict])


def first_unusable(reader: RowReader, found: np.ndarray) -> str:
    """What is wrong with the first row that cannot be used."""
    number = int(np.flatnonzero(found == Verdict.UNUSABLE)[0])
    try:
        reader[number]
    except DatasetError as error:
        return str(error)
    return f"row {number}: the chat template refuses its messages"


def _rows(columns: dict[str, list[Any]]) -> Iterator[Row]:
    names = list(columns)
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(names, values, strict=True))
