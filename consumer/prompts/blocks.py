"""Documents, cut into prompts and the texts that go on from them (`dataset.blocks`).

Guarantee: prompt and answer of a block are next to each other in its document, character for character; blocks come in order,
and equal documents, options and tokenizers give equal blocks. A document with fewer tokens than a block gives none.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

import datasets

from consumer.prompts.source_rows import Rows
from consumer.prompts.tokenizer import load_tokenizer
from consumer.prompts.written import Row
from protocol.config.data import BlocksSection, SourceSection
from protocol.errors import DatasetError
from protocol.wire.model_folder import tokenizer_digest

logger = logging.getLogger(__name__)

ANSWER = "answer"


def cut(documents: Rows, source: SourceSection, key: str, folder: Path, *, trust_remote_code: bool) -> Rows:
    """Return a row for each block, with the other columns of its document; once for its key in the cache of `datasets`. Raise
    DatasetError if there is no such column of texts, or no document is long enough."""
    assert source.blocks is not None
    blocks, column = source.blocks, source.blocks.column
    if column not in documents.names:
        known = ", ".join(map(repr, documents.names))
        raise DatasetError(f"{key}.blocks.column: {source.path} has no column {column!r}; it has {known}")
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    if not tokenizer.is_fast:
        raise DatasetError(f"{key}.blocks: the model's tokenizer does not say where in a text its tokens are")
    digests = documents.digest, tokenizer_digest(folder, trust_remote_code=trust_remote_code)
    name = hashlib.sha256(repr((*digests, source.prompt_column, blocks)).encode()).hexdigest()

    def expand(document: Row) -> list[Row]:
        text = document.pop(column) or ""
        if not isinstance(text, str):
            raise DatasetError(f"{key}.blocks.column: {column!r} of {source.path} holds no texts: {text!r:.80}")
        pairs = cut_text(text, tokenizer, blocks)
        return [document | {source.prompt_column: prompt, ANSWER: answer} for prompt, answer in pairs]

    cache = Path(datasets.config.HF_DATASETS_CACHE) / "slipstream"
    cache.mkdir(parents=True, exist_ok=True)
    rows = documents.expanded(expand, str(cache / f"blocks-{name}.arrow"), name)
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
