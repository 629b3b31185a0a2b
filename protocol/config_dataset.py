"""The `dataset:` section: where prompts come from and what becomes of a row.

Guarantee: as `protocol.config`.
"""

from typing import Any

from pydantic import Field, field_validator

from protocol.config_section import Section, place_and_name


class DatasetSection(Section):
    path: str = Field(
        description="Anything `datasets.load_dataset` takes: a hub name, or a local .jsonl, .json, .csv or .parquet file, "
        "or a folder written by `save_to_disk`."
    )
    name: str | None = Field(None, description="Configuration of a hub dataset, e.g. `main` for openai/gsm8k.")
    split: str = Field("train", description="Split to train on.")
    prompt_column: str = Field(
        "prompt",
        description="Column with the prompt: a string, or a list of chat messages. All other columns reach the "
        "reward functions.",
    )
    transform: str | None = Field(
        None,
        description="`module:function` or `file.py:function` applied to every row (dict -> dict) before the prompt "
        "column is looked up.",
    )
    shuffle: bool = Field(True, description="Shuffle the prompts anew every epoch, from `seed`.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the chat template, e.g. `enable_thinking: false`."
    )

    @field_validator("transform")
    @classmethod
    def _has_both_parts(cls, value: str | None) -> str | None:
        return None if value is None else place_and_name(value)
