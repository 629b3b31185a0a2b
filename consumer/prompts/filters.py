"""The rows of a source that a run uses: not those that the filter refuses, the transform skips or that are too long.

Guarantee: every row is judged once, in one pass that `datasets` keeps in its cache, with the prompts that a transform made; the
same rows, functions, tokenizer and bound are not judged again at the next start. A fault in a single row does not keep it out:
it is counted, and refused alone when its turn comes.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy as np
from datasets import Dataset

from consumer.prompts.rows import Prompt, RowReader, Verdict
from consumer.prompts.tokenizer import load_tokenizer
from consumer.prompts.transform import TransformProcess
from protocol.config.data import DatasetSection
from protocol.errors import DatasetError
from protocol.wire.messages import prompt_token_ids
from protocol.wire.model_folder import tokenizer_digest

logger = logging.getLogger(__name__)


class TokenLimit:
    """The longest prompt."""

    def __init__(self, section: DatasetSection, model_folder: Path | None, trust_remote_code: bool) -> None:
        assert model_folder is not None, "max_prompt_tokens needs the folder of the model"
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


class UsableRows:
    """The rows of `reader` that are not left out, which the log names. `digest` changes with all that they depend on. Raises
    DatasetError if none is left, or the filter raised. `check` is called while a transform takes long."""

    def __init__(self, reader: RowReader, limit: TokenLimit | None, check: Callable[[], None]) -> None:
        self.reader = reader
        self.digest = f"{reader.rows.digest} {reader.code_digest()}"
        self._numbers: Sequence[int] = range(len(reader.rows))
        self._judged: Dataset | None = None
        if limit is not None or reader.filter is not None or reader.transform is not None:
            self.digest += f" {limit.identity if limit else ''}"
            self._judged = _judged(reader, limit, hashlib.sha256(self.digest.encode()).hexdigest(), check)
            self._choose(np.asarray(self._judged.data.column("verdict"), np.int8), limit)
        _, columns = self[0]  # without a prompt in the first row, or a column for answers, the section is wrong
        reader.check_answer(columns, int(self._numbers[0]))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        """Raise DatasetError if the row has no usable prompt."""
        number = int(self._numbers[index])
        if self._judged is None or self.reader.transform is None:
            prompt = self.reader.read(self.reader.rows[number], number)
            assert prompt is not None
            return prompt
        row = self._judged[number]
        if row["problem"]:
            raise DatasetError(row["problem"])
        made: Prompt = msgspec.msgpack.decode(row["row"], type=tuple[Any, dict[str, Any]])
        return made

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, of all rows in order; None where a row has none, or cannot be used."""
        if self.reader.transform is None:
            rows = self.reader.rows if name in self.reader.rows.names else None
            return [None if rows is None else rows[int(number)][name] for number in self._numbers]
        assert self._judged is not None
        made = (self._judged[int(number)]["row"] for number in self._numbers)
        decoder = msgspec.msgpack.Decoder(tuple[Any, dict[str, Any]])
        return [decoder.decode(row)[1].get(name) if row else None for row in made]

    def place(self, index: int) -> str:
        """Row and dataset, for messages."""
        return self.reader.place(int(self._numbers[index]))

    def _choose(self, found: Any, limit: TokenLimit | None) -> None:
        reader, path = self.reader, self.reader.source.path
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
            assert self._judged is not None
            first = self._judged[int(unusable[0])]["problem"]
            text = "%s: %d rows cannot be used and will each be refused; the first: %s"
            logger.warning(text, reader.key, len(unusable), first)
        self._numbers = kept


def _judged(reader: RowReader, limit: TokenLimit | None, key: str, check: Callable[[], None]) -> Dataset:
    """Judge each row, once for its key in the cache: the verdict, the problem, and the prompt that a transform made."""
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "slipstream"
    cache.mkdir(parents=True, exist_ok=True)
    features = {"verdict": datasets.Value("int8"), "problem": datasets.Value("string")}
    if reader.transform is not None:
        features["row"] = datasets.Value("binary")
    with closing(TransformProcess(reader, check)) if reader.transform is not None else nullcontext(reader) as source:

        def judge(number: int) -> dict[str, Any]:
            verdict, prompt, made, problem = source.judge(number)
            if verdict == Verdict.KEPT and limit is not None:
                text = prompt[0] if prompt is not None else msgspec.msgpack.decode(made)[0]
                try:
                    verdict = verdict if limit.allows(text) else Verdict.TOO_LONG
                except Exception:  # a chat template raises what it likes
                    verdict, problem = (
                        Verdict.UNUSABLE,
                        f"{reader.place(number)}: the chat template refuses its messages",
                    )
            result = {"verdict": verdict, "problem": problem}
            return result if reader.transform is None else result | {"row": made if verdict == Verdict.KEPT else b""}

        file = cache / f"rows-{key}.arrow"
        judged = reader.rows.map(judge, datasets.Features(features), str(file), key)
        if isinstance(source, TransformProcess) and source.num_ended:
            file.unlink(missing_ok=True)  # at the next start those rows may come out
        return judged
