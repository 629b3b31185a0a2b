"""What a run is, as its journal remembers it, and whether this configuration may go on with it.

Guarantee: groups of another base model or tokenizer are never trained; groups that do not fit the present sampling or
rewards are dropped with a reason, not misread; a dataset that changed is refused or at least named.
"""

import json
from pathlib import Path
from typing import Any

from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DatasetError
from protocol.wire.digests import base_model_digest, tokenizer_digest
from protocol.wire.schemas import JOURNAL_SCHEMAS, group_schema

_IDENTITY = {
    "base_model_digest": "model.path",
    "tokenizer_digest": "model.path (its tokenizer)",
    "initial_adapter_digest": "lora.init_from",
}
_SHAPE = ("num_generations", "max_completion_length", "vocab_size", "reward_names")


def run_facts(
    config: RunConfig, model_folder: Path, run_id: str, vocab_size: int, num_iterations: int, num_threads: int
) -> dict[str, str]:
    """The facts that a journal keeps; lists as JSON."""
    facts: dict[str, Any] = {
        "run_id": run_id,
        "model_path": str(model_folder),
        "trust_remote_code": config.model.trust_remote_code,
        "base_model_digest": base_model_digest(model_folder, trust_remote_code=config.model.trust_remote_code),
        "tokenizer_digest": tokenizer_digest(model_folder, trust_remote_code=config.model.trust_remote_code),
        "reward_names": list(config.reward_names),
        "reward_weights": list(config.reward_weights),
        "wire_schema": group_schema(*_newer_fields(config)),
        "num_generations": config.sampling.num_generations,
        "max_completion_length": config.sampling.max_completion_length,
        "vocab_size": vocab_size,
        "groups_per_step": config.pipeline.groups_per_step,
        "fill": config.pipeline.fill,
        "num_iterations": num_iterations,
        "num_threads": num_threads,
    }
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


def _newer_fields(config: RunConfig) -> list[str]:
    """Of Group, those that this run may use."""
    outside = bool(config.posted_rewards) or config.environment.atropos
    return [
        *(["token_versions"] if config.swap.spans_versions or outside else []),
        *(["sampled", "episodes"] if config.environment.factory or outside else []),
    ]


def comparable(before: dict[str, str], now: dict[str, str], journal_file: Path) -> bool:
    """Whether groups made under the facts `before` can be trained now.

    Raises:
        ConfigError: they are of another model.
    """
    for name, key in _IDENTITY.items():
        if name in before and before[name] != now[name]:
            raise ConfigError(
                f"{key} is not the one that {journal_file} was written with; use that one, or choose another run_dir"
            )
    if int(before.get("wire_schema", 1)) not in JOURNAL_SCHEMAS:
        return False
    return all(before.get(name, now[name]) == now[name] for name in _SHAPE)


def dataset_change(before: dict[str, str], now: dict[str, str], journal_file: Path) -> str | None:
    """What has become of the dataset since the run that goes on last started, if that can be lived with.

    Raises:
        DatasetError: it has another number of prompts, so that ids name other rows, or none.
    """
    if before.get("num_prompts", now["num_prompts"]) != now["num_prompts"]:
        raise DatasetError(
            f"dataset: it has {now['num_prompts']} prompts now and had {before['num_prompts']} when {journal_file} was "
            "written; go on with the old one, or choose another run_dir"
        )
    if before.get("dataset_digest", now["dataset_digest"]) == now["dataset_digest"]:
        return None
    return (
        f"the dataset, or a file with its functions, is not what it was when {journal_file} was written. Groups stay what they "
        "are, but which prompts had their turn in this epoch, come back or rest goes by their numbers. If rows have moved, stop "
        "and choose another run_dir"
    )
