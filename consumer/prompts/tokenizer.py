"""The tokenizer of the model that is trained. Python files of the model's own run only with `model.trust_remote_code`."""

from pathlib import Path
from typing import Any

from protocol.wire.model_folder import reading_model


def load_tokenizer(folder: Path, *, trust_remote_code: bool, **options: Any) -> Any:
    """Load it with options of `AutoTokenizer.from_pretrained`. Raises ConfigError if transformers cannot."""
    from transformers import AutoTokenizer

    with reading_model(f"the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
