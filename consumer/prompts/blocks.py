"""Documents, cut into prompts and the texts that go on from them (`dataset.blocks`).

Guarantee: prompt and answer of a block are next to each other in its document, character for character; blocks come in order,
and equal documents, options and tokenizers give equal blocks. A document with fewer tokens than a block gives none.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from consumer.prompts.rows import rows_digest
from consumer.prompts.tokenizer import load_tokenizer
from protocol.config.data import BlocksSection, SourceSection
from protocol.errors import DatasetError
from protocol.wire.model_folder import tokenizer_digest

logger = logging.getLogger(__name__)

ANSWER = "answer"
_DOCUMENTS = 100  # at a time


def cut(documents: Dataset, source: SourceSection, key: str, folder: Path, *, trust_remote_code: bool) -> Dataset:
    """Return a row for each block, with the other columns of its document; once for its key in the cache of `datasets`. Raise
    DatasetError if there is no such column of texts, or no document is long enough."""
    assert source.blocks is not None
    blocks, column = source.blocks, source.blocks.column
    if column not in documents.column_names:
        known = ", ".join(map(repr, documents.column_names))
        raise DatasetError(f"{key}.blocks.column: {source.path} has no column {column!r}; it has {known}")
    if documents.features[column] not in (datasets.Value("string"), datasets.Value("large_string")):
        raise DatasetError(f"{key}.blocks.column: {column!r} of {source.path} holds no texts")
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    if not tokenizer.is_fast:
        raise DatasetError(f"{key}.blocks: the model's tokenizer does not say where in a text its tokens are")
    digests = rows_digest(documents), tokenizer_digest(folder, trust_remote_code=trust_remote_code)
    name = hashlib.sha256(repr((*digests, source.prompt_column, blocks)).encode()).hexdigest()

    def expand(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found = [
            (row, *each) for row, text in enumerate(batch[column]) for each in cut_text(text or "", tokenizer, blocks)
        ]
        others = {name: [values[row] for row, _, _ in found] for name, values in batch.items() if name != column}
        return others | {source.prompt_column: [each[1] for each in found], ANSWER: [each[2] for each in found]}

    cache = Path(datasets.config.HF_DATASETS_CACHE) / "slipstream"
    cache.mkdir(parents=True, exist_ok=True)
    rows = documents.map(
        expand,
        batched=True,
        batch_size=_DOCUMENTS,
        remove_columns=documents.column_names,
        features=datasets.Features(
            {name: kind for name, kind in documents.features.items() if name != column}
            | dict.fromkeys((source.prompt_column, ANSWER), datasets.Value("string"))
        ),
        cache_file_name=str(cache / f"blocks-{name}.arrow"),
        new_fingerprint=name,
    )
    if len(rows) == 0:
        need = blocks.context + blocks.continuation
        raise DatasetError(
            f"{key}.blocks: no document of {source.path} has {need} tokens; lower context or continuation"
        )
    logger.info("%s: %d blocks of the %d documents of %s", key, len(rows), len(documents), source.path)
    return rows


def cut_text(text: str, tokenizer: Any, blocks: BlocksSection) -> list[tuple[str, str]]:
    """Return prompt and answer of each block of a text."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in found["offset_mapping"]] + [len(text)]
    length = blocks.context + blocks.continuation
    first_tokens = range(0, len(starts) - length, blocks.stride or blocks.continuation)
    places = [(starts[first], starts[first + blocks.context], starts[first + length]) for first in first_tokens]
    return [(text[begin:middle], text[middle:end]) for begin, middle, end in places if begin < middle < end]
