"""The prompt dataset: prompts by id, each with the columns that its rewards need.

Guarantee: a dataset that opened has at least one row, and the first row of each source has a usable prompt; a later row that
has none is refused alone, with its number. Ids stay the same at every start as long as `digest` does.
"""

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from consumer.prompts.blocks import cut
from consumer.prompts.filters import TokenLimit, UsableRows
from consumer.prompts.opening import load_rows
from consumer.prompts.rows import Prompt, RowReader
from protocol.config.data import DatasetSection
from protocol.config.environments import COLUMN, SINGLE_TURN
from protocol.config.run import RunConfig
from protocol.errors import DatasetError
from replay.sources import ENVIRONMENTS, ONE, Parts, Sources

logger = logging.getLogger(__name__)

MOST_PROMPTS = 100_000_000
"""The most prompts of an epoch. More come of weights that do not fit the row counts."""


class PromptDataset:
    """The prompts of a dataset, by id. `digest` is 64 hex digits that change with the rows, with what is skipped and with the
    files of the functions. The tokenizer of `model_folder`, of files of its own only with `trust_remote_code`, counts tokens of
    prompts, and cuts documents. In a run with several environments rows name one of `environments`, and get its name as a column.
    `sources` are those of the prompts, where they have several.

    Raises:
        DatasetError: no such dataset or split, no rows, no prompt in the first row, a row names no environment that there is, or
            the filter raised.
        ConfigError: a function that the section names cannot be imported.
    """

    def __init__(
        self,
        section: DatasetSection,
        model_folder: Path | None = None,
        *,
        trust_remote_code: bool = False,
        check: Callable[[], None] = lambda: None,
        environments: Sequence[str] = (),
    ) -> None:
        limit = TokenLimit(section, model_folder, trust_remote_code) if section.max_prompt_tokens else None
        self._sources = []
        for key, source in section.all_sources.items():
            rows = load_rows(source, key)
            if source.blocks is not None:
                assert model_folder is not None, "blocks need the folder of the model"
                rows = cut(rows, source, key, model_folder, trust_remote_code=trust_remote_code)
            self._sources.append(UsableRows(RowReader(source, key, rows), limit, check))
        self._routes = [Route(rows, environments) for rows in self._sources] if environments else []
        given = [rows.reader.source for rows in self._sources]
        parts = [f"{rows.digest} {source.weight}" for rows, source in zip(self._sources, given, strict=True)]
        self.digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        weights = [source.weight for source in given if source.weight is not None]
        self._mixture = Mixture([len(rows) for rows in self._sources], weights or None)
        self.sources = Sources.of(section.source_names, self._mixture.counts)
        if len(self.environments) > 1:
            several = Parts(ENVIRONMENTS, tuple(sorted(self.environments)), self.environment_of)
            self.sources = replace(self.sources, environments=several)
        shares = ", ".join(
            f"{count} of {source.name or source.path} ({len(rows)} rows)"
            for count, source, rows in zip(self._mixture.counts, given, self._sources, strict=True)
        )
        if len(self) > MOST_PROMPTS:
            raise DatasetError(
                f"dataset.sources: with these weights an epoch has {len(self):,} prompts, because every row comes at least "
                f"once; bring the weights closer to the numbers of rows ({shares})"
            )
        if len(self._sources) > 1:
            logger.info("dataset: %d prompts: %s", len(self), shares)

    def check_columns(self, names: Iterable[str], key: str) -> None:
        """Raise DatasetError if the first row of a source has no such column, which `key` of the configuration names."""
        for rows in self._sources:
            _, columns = rows[0]
            for name in names:
                if name not in columns:
                    raise DatasetError(
                        f"{key}: {rows.reader.source.path} has no column {name!r}; it has {', '.join(map(repr, columns))}"
                    )

    @property
    def columns(self) -> list[str]:
        """The columns that the first row of any source has."""
        firsts = [self[prompt_id][1] for prompt_id in self.first_of_sources()]
        return list(dict.fromkeys(name for columns in firsts for name in columns))

    def first_of_sources(self) -> list[int]:
        """Return the first prompt of each source."""
        return self._mixture.firsts()

    def __len__(self) -> int:
        return len(self._mixture)

    def __getitem__(self, prompt_id: int) -> Prompt:
        """Raise DatasetError if the row has no usable prompt."""
        source, row = self._mixture[prompt_id]
        prompt, columns = self._sources[source][row]
        return prompt, columns | {COLUMN: self._routes[source].of(row)} if self._routes else columns

    def environment_of(self, prompt_id: int) -> str:
        """Return the name of a prompt's environment; empty in a run without several."""
        source, row = self._mixture[prompt_id]
        return self._routes[source].of(row) if self._routes else ""

    def environment_parts(self) -> dict[str, float]:
        """Return the part of an epoch's prompts that each environment has, by name."""
        parts: dict[str, float] = {}
        for route, count in zip(self._routes, self._mixture.counts, strict=True):
            for name, part in route.parts().items():
                parts[name] = parts.get(name, 0.0) + part * count / len(self)
        return parts

    @property
    def environments(self) -> set[str]:
        """The names of all environments that prompts have."""
        return set[str]().union(*(route.names for route in self._routes))

    def place(self, prompt_id: int) -> str:
        """Row and dataset of a prompt, for messages."""
        source, row = self._mixture[prompt_id]
        return self._sources[source].place(row)


class Route:
    """The environments of a source's rows. Raises DatasetError if a row names one that is not in `known`, or another than its
    source does."""

    def __init__(self, rows: UsableRows, known: Sequence[str]) -> None:
        key, given = rows.reader.key, rows.reader.source.environment
        named = [given or SINGLE_TURN if value in (None, "") else value for value in rows.column(COLUMN)]
        for row, name in enumerate(named):
            if name not in known:
                raise DatasetError(
                    f"{key}: {rows.place(row)}: the column {COLUMN!r} is {name!r}, which is not one of {', '.join(known)}"
                )
            if given is not None and name != given:
                raise DatasetError(
                    f"{key}.environment is {given!r}, and the column {COLUMN!r} of {rows.place(row)} is {name!r}; remove one "
                    "of them"
                )
        self.names = sorted(set(named))
        numbers = {name: number for number, name in enumerate(self.names)}
        self._numbers = np.array([numbers[name] for name in named], np.uint16)

    def parts(self) -> dict[str, float]:
        """Return the part of the rows that each environment has."""
        counts = np.bincount(self._numbers, minlength=len(self.names)) / len(self._numbers)
        return dict(zip(self.names, counts.tolist(), strict=True))

    def of(self, row: int) -> str:
        """Return the name of a row's environment."""
        return str(self.names[self._numbers[row]])


class Placeholders:
    """A stand-in for the PromptDataset of a run that has none, because environments of Atropos choose their own items.

    A placeholder is a credit for one group and nothing else. There are so many that an epoch ends in no run that anybody has
    seen; when one does, the next begins, and nothing depends on it.
    """

    sources = ONE
    digest = hashlib.sha256(b"items of environments of Atropos").hexdigest()

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, prompt_id: int) -> Prompt:
        """A text, which is no more than the probe of a swap needs, and no columns."""
        return self.place(prompt_id), {}

    def first_of_sources(self) -> list[int]:
        """Return none: placeholders have no sources."""
        return []

    def environment_of(self, prompt_id: int) -> str:
        """Return nothing: all are of environments of Atropos."""
        return ""

    def place(self, prompt_id: int) -> str:
        """Return the group's name, for messages."""
        return f"group {prompt_id} of the environments of Atropos"


def open_prompts(config: RunConfig, model_folder: Path, check: Callable[[], None]) -> PromptDataset | Placeholders:
    """Raise what PromptDataset raises."""
    if config.environment.atropos:
        return Placeholders()
    trusted = config.model.trust_remote_code
    prompts = PromptDataset(
        config.dataset, model_folder, trust_remote_code=trusted, check=check, environments=config.routes
    )
    unused = set(config.by_environment) - prompts.environments if config.environments else None
    if unused:
        raise DatasetError(
            f"environments: no row names {', '.join(sorted(unused))}; give a source its `environment`, or remove it"
        )
    for number, teacher in enumerate(config.teachers):
        prompts.check_columns(teacher.columns, f"teachers.{number}.prompt")
    if (column := config.sampling.max_completion_length_column) is not None:
        prompts.check_columns([column], "sampling.max_completion_length_column")
    return prompts


class Mixture:
    """Mixes sources of these sizes, none of them 0, by their weights in relation to each other; None: every row comes once."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None) -> None:
        self._sizes = list(sizes)
        self.counts = list(sizes)
        """Prompts of each source in an epoch."""
        if weights is not None:
            per_weight = max(size / weight for size, weight in zip(sizes, weights, strict=True))
            self.counts = [max(size, round(per_weight * weight)) for size, weight in zip(sizes, weights, strict=True)]
        self._ends = list(accumulate(self.counts))

    def firsts(self) -> list[int]:
        """Return the first prompt of each source."""
        return [end - count for end, count in zip(self._ends, self.counts, strict=True)]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, prompt_id: int) -> tuple[int, int]:
        """Source and row."""
        if not 0 <= prompt_id < len(self):
            raise IndexError(prompt_id)
        source = bisect_right(self._ends, prompt_id)
        return source, (prompt_id - self._ends[source] + self.counts[source]) % self._sizes[source]
