"""The `dataset:` section: where prompts come from and what becomes of a row.

Guarantee: a section names at least one source, and every source bounds what it reads of a stream.
"""

from typing import Any

from pydantic import Field

from protocol.config.sections.section import PlaceAndName, Positive, PositiveFloat, Problems, Section


class _RowsSection(Section):
    path: str = Field(
        description="Anything `datasets.load_dataset` takes: a hub name, or a local .jsonl, .json, .csv or .parquet file, "
        "or a folder written by `save_to_disk`."
    )
    name: str | None = Field(None, description="Configuration of a hub dataset, e.g. `main` for openai/gsm8k.")
    revision: str | None = Field(
        None, description="Hub revision (branch, tag or commit). A commit keeps the rows the same at every start."
    )
    split: str = Field("train", description="Split to train on, or a part of one: `train[:1000]`, `train[10%:]`.")
    streaming: bool = Field(
        False,
        description="Read only the first `max_rows` rows, without downloading the rest. They are read at every start and kept "
        "in memory, because every prompt has a number that stays the same when the run goes on.",
    )
    max_rows: Positive | None = Field(None, description="Take only the first so many rows. Needed with `streaming`.")
    prompt_column: str = Field(
        "prompt",
        description="Column with the prompt: a string, or a list of chat messages. All other columns reach the "
        "reward functions.",
    )
    filter: PlaceAndName | None = Field(
        None,
        description="`module:function` or `file.py:function` (row -> bool), applied before `transform`; rows for which it "
        "returns False are skipped and counted.",
    )
    transform: PlaceAndName | None = Field(
        None,
        description="`module:function` or `file.py:function` applied to every row (dict -> dict) before the prompt "
        "column is looked up. A row for which it returns None is skipped and counted. While the run trains it runs in a "
        "process of its own; a row that takes it a minute is given up, and the run goes on.",
    )

    def problems(self) -> Problems:
        if self.streaming and self.max_rows is None:
            yield "`streaming` needs `max_rows`, the number of rows to take from the stream"


class SourceSection(_RowsSection):
    weight: PositiveFloat | None = Field(
        None,
        description="Share of the prompts of an epoch, in relation to the other sources' weights. An epoch has every row of "
        "every source at least once; rows of a source that has too few for its share come more than once. Without weights "
        "every row comes once.",
    )


class DatasetSection(_RowsSection):
    path: str | None = Field(  # type: ignore[assignment]  # a dataset is a source, or it has some
        None, description=f"{_RowsSection.model_fields['path'].description} Or give `sources`."
    )
    sources: list[SourceSection] = Field(
        default_factory=list,
        description="Several datasets in place of one. Each has keys of its own, those above; of them none may then be given "
        "beside `sources`.",
    )
    shuffle: bool = Field(
        True,
        description="Shuffle the prompts anew every epoch, from `seed`. Without, sources come one after the other.",
    )
    max_prompt_tokens: Positive | None = Field(
        None,
        description="Rows whose prompt, rendered with the chat template and tokenized by the model's tokenizer, is longer are "
        "skipped and counted.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the chat template, e.g. `enable_thinking: false`."
    )

    def problems(self) -> Problems:
        yield from super().problems()
        if not self.sources and self.path is None:
            yield "`path`: required, unless `sources` are given"
        for key in _RowsSection.model_fields if self.sources else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"`{key}` cannot be given beside `sources`; give it in each source that needs it"
        if len({source.weight is None for source in self.sources}) > 1:
            yield "`sources`: give every one a weight, or none"

    @property
    def all_sources(self) -> dict[str, SourceSection]:
        """By their keys in the file."""
        if self.sources:
            return {f"dataset.sources[{number}]": source for number, source in enumerate(self.sources)}
        values = {key: getattr(self, key) for key in _RowsSection.model_fields}
        return {"dataset": SourceSection.model_construct(**values, weight=None)}
