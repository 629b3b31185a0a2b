"""The sections that name a run's inputs: model and sampling, prompts, the held-out prompts.

Guarantee: a section that exists is complete; an inconsistent one is refused with its key and the fix.
"""

import json
import re
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field

from protocol.config.places import row_file_ending
from protocol.config.section import (
    Count,
    Label,
    PlaceAndName,
    Positive,
    PositiveFloat,
    PositiveSeconds,
    Problems,
    Section,
    Share,
)
from protocol.wire.messages import Sampling

StopText = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ModelSection(Section):
    path: str = Field(description="Base model: a local folder or hub name.")
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    trust_remote_code: bool = Field(
        False,
        description="Run the model's Python files in both daemons; see docs/security.md.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16",
        description="Dtype of the base weights on both sides. LoRA weights train in fp32. On a GPU `swap.mode: "
        "adapter` needs 16 bits.",
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        None,
        description="bitsandbytes format of the trainer's frozen linear layers; see docs/models.md.",
    )


class SamplingSection(Section):
    num_generations: Annotated[int, Field(ge=1, le=4096)] = Field(8, description="Completions per prompt (the group).")
    max_completion_length: Annotated[int, Field(ge=1, le=2**24)] = Field(
        256, description="Longest completion, in tokens."
    )
    max_completion_length_column: str | None = Field(None, description="Column with a row's own, if that is less.")
    temperature: Annotated[float, Field(gt=0, le=100)] = Field(1.0, description="Applied on both sides.")
    top_p: Share = Field(1.0, description="Nucleus sampling; see accept_biased_ratios.")
    top_k: Count = Field(0, description="Top-k sampling, 0 is off; see accept_biased_ratios.")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="Min-p sampling; see accept_biased_ratios.")
    stop: Annotated[list[StopText], Field(max_length=16)] = Field(
        [],
        description="Texts that end a completion, and stay in it.",
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(
        [], description="Tokens that also end a completion, and stay in it."
    )
    ignore_eos: bool = Field(False, description="Ignore the model's end of a text.")
    regex: Annotated[str, Field(min_length=1, max_length=65_536)] | None = Field(
        None, description="Guided decoding: only what the expression matches is sampled; see accept_biased_ratios."
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="Guided decoding: only JSON of this JSON schema is sampled; see accept_biased_ratios."
    )
    accept_biased_ratios: bool = Field(
        False,
        description="Accept top_p, top_k, min_p, regex and json_schema, which bias importance ratios.",
    )

    def problems(self) -> Problems:
        if self.regex is not None and self.json_schema is not None:
            yield "regex and json_schema exclude each other; remove one"
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "regex": None, "json_schema": None}
        changed = [f"{key}={getattr(self, key)}" for key in off if getattr(self, key) != off[key]]
        if changed and not self.accept_biased_ratios:
            yield (
                f"{', '.join(changed)} changes the sampling distribution in a way the trainer does not reproduce, so "
                "importance ratios would be biased. Remove it, or set sampling.accept_biased_ratios=true"
            )

    @property
    def message(self) -> Sampling:
        """The sampling as leases carry it."""
        values = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        values |= {"stop": tuple(self.stop), "stop_token_ids": tuple(self.stop_token_ids)}
        schema = "" if self.json_schema is None else json.dumps(self.json_schema)
        return Sampling(**values | {"regex": self.regex or "", "json_schema": schema})


class BlocksSection(Section):
    context: Positive = Field(description="Tokens of a prompt.")
    continuation: Positive = Field(description="Tokens of its `answer`, the column.")
    stride: Positive | None = Field(None, description="Tokens from block to block. Default: `continuation`.")
    column: str = Field("text", description="Column with the documents.")


_GENERATED = ("size", "seed", "config", "difficulty", "template")
_OF_FILES = ("path", "subset", "revision", "split", "streaming", "blocks")


class _RowsSection(Section):
    path: str | None = Field(
        None,
        description="Rows: a file or pattern (.jsonl, .json, .csv, .tsv, .parquet, .arrow; or with .gz), a folder of files or of "
        "`save_to_disk`, or a hub name.",
    )
    reasoning_gym: str | None = Field(None, description="Set of reasoning-gym, in place of `path`.")
    size: Positive | None = Field(None, description="Its rows, less held-out ones.")
    seed: Count | None = Field(None, description="Row i is drawn by `seed` + i. Default: 1; held out 1000000.")
    config: dict[str, Any] = Field({}, description="Its settings.")
    difficulty: Count | None = Field(None, description="Level of its own curriculum, for settings that `config` lacks.")
    template: str = Field("{question}", description="Text of prompts: `{question}`, or entries of metadata.")
    subset: str | None = Field(None, description="Configuration of a hub dataset, e.g. `main` for openai/gsm8k.")
    revision: str | None = Field(None, description="Hub revision. A commit keeps the rows the same.")
    split: str = Field(
        "train", description="Split, or parts: `train[:1000]`, `train[10%:]+test`. A file or saved Dataset is `train`."
    )
    streaming: bool = Field(
        False,
        description="Read the first `max_rows` rows at every start, without downloading the rest.",
    )
    max_rows: Positive | None = Field(None, description="Use only the first N rows. Needed with `streaming`.")
    prompt_column: str = Field(
        "prompt",
        description="Column with the prompt: text, or chat messages. Rewards get the others as the file says them: cells of CSV "
        "are texts, and so become dates, times and decimals of Arrow.",
    )
    environment: str | None = Field(
        None,
        description="Which of `environments` plays its rows. Default: the row's column `environment`, else a single turn.",
    )
    answer_column: str | None = Field(None, description="Column with the reference answer, for `loss.ce_coef`.")
    blocks: BlocksSection | None = Field(None, description="Cut documents into prompts and answers, before `filter`.")
    filter: PlaceAndName | None = Field(
        None,
        description="`module:function` or `file.py:function` (row -> bool), applied before `transform`; rows with "
        "False are skipped.",
    )
    transform: PlaceAndName | None = Field(
        None,
        description="The same (dict -> dict), applied once to every row. Rows with None, or that take a minute, are "
        "skipped.",
    )

    def problems(self) -> Problems:
        if self.reasoning_gym is not None:
            for key in _OF_FILES:
                if getattr(self, key) != type(self).model_fields[key].default:
                    yield f"`{key}` is of rows that are read, and reasoning_gym makes its own; remove one of them"
            if self.size is None:
                yield "`size`: reasoning_gym needs it, the number of rows to make"
        for key in _GENERATED if self.reasoning_gym is None else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"`{key}` is for reasoning_gym; name its data set there, or remove the key"
        if self.streaming and self.max_rows is None:
            yield "`streaming` needs `max_rows`, the number of rows to take from the stream"


class SourceSection(_RowsSection):
    path: str | None = Field(None, description="As `dataset.path`.")
    name: Label | None = Field(
        None,
        description="Name in metrics and reports. Default: the end of `path`, or the set.",
    )
    level: Count | None = Field(None, description="Level in `curriculum`, from 0. Default: always open.")
    weight: PositiveFloat | None = Field(
        None,
        description="Share of an epoch's prompts, relative to other sources; rows may repeat. Default: each comes once.",
    )
    judge: str | None = Field(None, description="Reward that judges failure here. Default: `reroll.reward`.")

    def problems(self) -> Problems:
        yield from super().problems()
        if self.path is None and self.reasoning_gym is None:
            yield "`path`: required, unless `reasoning_gym` is given"

    @property
    def label(self) -> str:
        """The name in metrics and reports."""
        if self.name is not None:
            return self.name
        if self.reasoning_gym is not None:
            return self.reasoning_gym if self.difficulty is None else f"{self.reasoning_gym}-{self.difficulty}"
        last = PurePath(self.path or "").name
        name = last.removesuffix(".gz").removesuffix(row_file_ending(last) or "")
        return re.sub(r"[^\w.-]", "-", name)[:64] or "rows"


class CurriculumSection(Section):
    window: Positive = Field(32, description="Groups of the level, without returns, that decide.")
    up: Share = Field(
        0.7, description="Success rate at which the next level opens: completions above `reroll.fail_threshold`."
    )
    down: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Success rate at which the level before comes back. null: never."
    )
    rehearse: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="Probability with which prompts of lower levels are asked."
    )

    def problems(self) -> Problems:
        if self.down is not None and self.down >= self.up:
            yield f"down={self.down} must be below up={self.up}"


class DatasetSection(_RowsSection):
    path: str | None = Field(None, description=f"{_RowsSection.model_fields['path'].description} Or give `sources`.")
    sources: list[SourceSection] = Field(
        default_factory=list,
        description="Several datasets, in place of the keys above.",
    )
    shuffle: bool = Field(
        True,
        description="Shuffle the prompts anew every epoch, from `seed`.",
    )
    sampling: Literal["fixed", "by_signal"] = Field(
        "fixed",
        description="`fixed`: ask every prompt once in an epoch. `by_signal`: in proportion to the chance that its group "
        "has signal, by what is known of it and its source; at least one in ten.",
    )
    curriculum: CurriculumSection | None = Field(
        None, description="Open `sources` by their levels, as they are solved."
    )
    max_prompt_tokens: Positive | None = Field(
        None,
        description="Rows with a longer prompt, in tokens, are skipped.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the chat template, e.g. `enable_thinking: false`."
    )

    def problems(self) -> Problems:
        yield from super().problems()
        if not self.sources and self.path is None and self.reasoning_gym is None:
            yield "`path`: required, unless `reasoning_gym` or `sources` are given"
        for key in _RowsSection.model_fields if self.sources else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"`{key}` cannot be given beside `sources`; give it in each source that needs it"
        if len({source.weight is None for source in self.sources}) > 1:
            yield "`sources`: give every one a weight, or none"
        yield from self._level_problems()
        labels = self.source_names
        for label in labels:
            if labels.count(label) > 1:
                yield f"`sources`: two are called `{label}`; give each a `name` of its own"

    def _level_problems(self) -> Problems:
        levels = [source.level for source in self.sources if source.level is not None]
        if self.curriculum is None and levels:
            yield "`sources`: a level is for `curriculum`; add it (`curriculum: {}`), or remove the levels"
        if self.curriculum is not None and len(set(levels)) < 2:
            yield "`curriculum`: needs `sources` of two levels or more, such as `level: 0` and `level: 1`"
        for before, level in pairwise([-1, *levels]):
            if not 0 <= level - before <= 1:
                yield f"`sources`: level {level} is out of order; levels begin at 0 and rise by 1 from source to source"

    @property
    def all_sources(self) -> dict[str, SourceSection]:
        """The datasets by their keys in the file."""
        if self.sources:
            return {f"dataset.sources[{number}]": source for number, source in enumerate(self.sources)}
        values = {key: getattr(self, key) for key in _RowsSection.model_fields}
        return {"dataset": SourceSection.model_construct(**values, name=None, level=None, weight=None, judge=None)}

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources, in the order of their prompts."""
        return tuple(source.label for source in self.sources)


WEIGHTED_SUM = "reward"
"""The metric that is the weighted sum of all reward functions."""


class EvaluationSection(Section):
    dataset: DatasetSection = Field(description="The held-out prompts, with the keys of `dataset`, asked in order.")
    every_versions: Positive = Field(50, description="Evaluate every N policy versions, and the last one of the run.")
    before_training: bool = Field(True, description="Evaluate version 0, which is where training starts.")
    max_prompts: Positive | None = Field(None, description="Use only the first N prompts. null: all.")
    num_completions: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="Completions per prompt.")
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0, description="0 is greedy, and takes one completion per prompt."
    )
    metric: str = Field(
        WEIGHTED_SUM,
        description="Worth of a completion: the name of a reward function, or `reward`, the weighted sum.",
    )
    threshold: float | None = Field(
        None,
        description="Worth from which a completion passes; the score is then pass@k. null: the score is the mean worth.",
    )
    pass_k: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="The k of pass@k, at most `num_completions`. docs/algorithms.md has the estimator."
    )
    keep_best: bool = Field(True, description="Keep the adapter with the best score in `checkpoints/best`.")
    patience: Positive | None = Field(
        None,
        description="The run ends, as finished, after N evaluations in a row without improvement. null: never.",
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Improvement over the best score that counts for `patience`."
    )
    wait_s: PositiveSeconds = Field(
        600.0,
        description="Longest wait without an answer for the last evaluation.",
    )
    hold_swap_s: PositiveSeconds = Field(
        60.0,
        description="With `swap.mode: merged`: longest time for which a producer keeps evaluated weights.",
    )

    def problems(self) -> Problems:
        if self.temperature == 0 and self.num_completions > 1:
            same = f"num_completions={self.num_completions} at temperature 0 would all be the same"
            yield f"{same}; set num_completions: 1, or a temperature"
        if self.pass_k > self.num_completions:
            yield f"pass_k={self.pass_k} is above num_completions={self.num_completions}; raise num_completions"
        if self.pass_k > 1 and self.threshold is None:
            yield f"pass_k={self.pass_k} needs a threshold, above which a completion passes"

    @property
    def score_name(self) -> str:
        """The name of the score: scores of the same name can be compared."""
        return (
            f"mean {self.metric}" if self.threshold is None else f"pass@{self.pass_k} {self.metric}>={self.threshold:g}"
        )
