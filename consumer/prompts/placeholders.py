"""What stands for the prompts of a run that has none, because environments of Atropos choose their own items.

Guarantee: a placeholder is a credit for one group and nothing else. There are so many that an epoch ends in no run that anybody
has seen; when one does, the next begins, and nothing depends on it.
"""

import hashlib
from pathlib import Path
from typing import Any

from consumer.prompts.dataset import PromptDataset
from protocol.config.run import RunConfig
from protocol.errors import DatasetError

_COUNT = 1_000_000


class Placeholders:
    """Takes the place of a PromptDataset."""

    digest = hashlib.sha256(b"items of environments of Atropos").hexdigest()

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        """A text, which is no more than the probe of a swap needs, and no columns."""
        return self.place(prompt_id), {}

    def place(self, prompt_id: int) -> str:
        """For messages."""
        return f"group {prompt_id} of the environments of Atropos"


def open_prompts(config: RunConfig, model_folder: Path) -> PromptDataset | Placeholders:
    """
    Raises:
        DatasetError, ConfigError: as PromptDataset.
    """
    if config.environment.atropos:
        return Placeholders()
    return PromptDataset(config.dataset, model_folder, trust_remote_code=config.model.trust_remote_code)


def check_has_rows(config: RunConfig) -> None:
    """
    Raises:
        DatasetError: what is asked for needs rows, and this run has none.
    """
    if config.environment.atropos:
        raise DatasetError("dataset: with environment.atropos there is none, environments have their own items")
