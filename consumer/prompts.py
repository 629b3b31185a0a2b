"""The prompt dataset: rows by id, each a prompt and the columns that its rewards need.

Guarantee: a dataset that opened has at least one row, and its first row has a usable prompt; a later row that has none is
refused alone, with its number.
"""

from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk

from protocol.config_dataset import DatasetSection
from protocol.errors import DatasetError
from protocol.functions import load_function
from protocol.prompts import is_conversational

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class PromptDataset:
    """See the module's guarantee.

    Raises:
        DatasetError: no such dataset or split, no rows, or no prompt in the first row.
        ConfigError: `dataset.transform` cannot be imported.
    """

    def __init__(self, section: DatasetSection) -> None:
        self._section = section
        self._rows = _load(section)
        self._transform = load_function(section.transform, "dataset.transform") if section.transform else None
        if len(self._rows) == 0:
            raise _no_rows(section)
        self[0]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        """The prompt (a string or a list of messages) and all other columns of one row.

        Raises:
            DatasetError: the transform raised, or the row has no usable prompt.
        """
        row = self._rows[prompt_id]
        if self._transform is not None:
            try:
                row = dict(self._transform(row))
            except Exception as error:
                raise DatasetError(
                    f"dataset.transform raised on row {prompt_id} of {self._section.path}: {type(error).__name__}: {error}"
                ) from error
        column = self._section.prompt_column
        if column not in row:
            raise DatasetError(
                f"dataset.prompt_column: {self._section.path} has no column {column!r}; it has {', '.join(map(repr, row))}"
            )
        prompt = row.pop(column)
        if not (prompt if isinstance(prompt, str) else is_conversational(prompt)):
            raise DatasetError(
                f"row {prompt_id} of {self._section.path}: {column!r} must be a string that is not empty, or a list of "
                f"messages with role and content, got {str(prompt)[:80]!r}"
            )
        return prompt, row


def _load(section: DatasetSection) -> Dataset:
    path = Path(section.path)
    builder = _BUILDERS.get(path.suffix)
    if builder and not path.is_file():
        raise DatasetError(f"dataset.path: there is no file {section.path} (looked from {Path.cwd()})")
    if path.is_file() and not builder:
        raise DatasetError(f"dataset.path: {section.path} must end in one of {', '.join(_BUILDERS)}")
    if path.is_file() and path.stat().st_size == 0:
        raise _no_rows(section)
    try:
        if builder:
            return load_dataset(builder, data_files=str(path), split="train")
        if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
            loaded = load_from_disk(str(path))
            return loaded if isinstance(loaded, Dataset) else loaded[section.split]
        return load_dataset(section.path, section.name, split=section.split)
    except Exception as error:
        if "corresponds to no data" in str(error):  # what `datasets` says of a file with a header only
            raise _no_rows(section) from error
        reason = error.__cause__ or error
        raise DatasetError(
            f"dataset.path: {section.path} (split {section.split}) could not be loaded: "
            f"{type(reason).__name__}: {reason}"
        ) from error


def _no_rows(section: DatasetSection) -> DatasetError:
    return DatasetError(f"dataset.path: {section.path}, split {section.split}, has no rows")
