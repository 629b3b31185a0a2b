"""Facts of a run in its journal, which decide whether this configuration may go on with it or train it again.

Guarantee: groups of another base model or tokenizer are never trained. Groups that do not fit the present sampling or
rewards are dropped with a reason, not misread. Recorded batches are trained again only as they were cut. A dataset that
changed is refused or at least named.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DatasetError, JournalError
from protocol.wire.codec import SCHEMA_VERSION
from protocol.wire.model_folder import base_model_digest, tokenizer_digest
from replay.credit import CreditRecipe

Facts = dict[str, str]


class _Fact(NamedTuple):
    key: str  # of the configuration
    decides: Literal["run", "groups", "batches"]  # these cannot be used any more when it changes


_MUST_BE_EQUAL = {
    "base_model_digest": _Fact("model.path", "run"),
    "initial_adapter_digest": _Fact("lora.init_from", "run"),
    "full_weights": _Fact("lora", "run"),
    "trainable": _Fact("trainable", "run"),
    "merged_keys": _Fact("lora (what the trainer merges)", "run"),
    "tokenizer_digest": _Fact("model.path (its tokenizer)", "run"),
    "num_generations": _Fact("sampling.num_generations", "groups"),
    "max_completion_length": _Fact("sampling.max_completion_length", "groups"),
    "vocab_size": _Fact("model.path (its vocabulary)", "groups"),
    "reward_names": _Fact("rewards.functions", "groups"),
    "groups_per_step": _Fact("pipeline.groups_per_step", "batches"),
    "num_iterations": _Fact("trainer.num_iterations", "batches"),
    "quantization": _Fact("model.quantization", "batches"),
    "has_teachers": _Fact("teachers", "groups"),
    "teacher_top_k": _Fact("distillation.top_k", "groups"),
}


def run_facts(
    config: RunConfig, model_folder: Path, run_id: str, vocab_size: int, num_iterations: int, num_threads: int
) -> Facts:
    """Return the facts that a journal keeps; lists as JSON."""
    credit = CreditRecipe.of(config.rewards)
    facts: dict[str, Any] = {
        "run_id": run_id,
        "model_path": str(model_folder),
        "trust_remote_code": config.model.trust_remote_code,
        "base_model_digest": base_model_digest(model_folder, trust_remote_code=config.model.trust_remote_code),
        "tokenizer_digest": tokenizer_digest(model_folder, trust_remote_code=config.model.trust_remote_code),
        "reward_names": list(config.reward_names),
        "reward_weights": list(config.reward_weights),
        "credit": asdict(credit) if credit else "",
        "wire_schema": SCHEMA_VERSION,
        "num_generations": config.sampling.num_generations,
        "max_completion_length": config.sampling.max_completion_length,
        "sampling": msgspec.structs.asdict(config.sampling.message),
        "model_dtype": config.model.dtype,
        "vocab_size": vocab_size,
        "groups_per_step": config.pipeline.groups_per_step,
        "fill": config.pipeline.fill,
        "num_iterations": num_iterations,
        "quantization": config.model.quantization or "",
        "num_threads": num_threads,
    }
    if config.lora is None:
        facts |= {"full_weights": "null (full weights)", "trainable": sorted(config.trainable) or ["*"]}
    if config.merged_keys:
        facts["merged_keys"] = {key: config.lora_section[key] for key in config.merged_keys}
    if config.teachers:
        facts["has_teachers"] = True
    if config.loss.ce_coef or config.loss.weights_column:
        facts["learns_from_rows"] = True
    if config.distillation is not None and config.distillation.num_top:
        facts["teacher_top_k"] = config.distillation.num_top
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


def credits_of(before: Facts, now: Facts, step: int) -> str:
    """Return `credit` of all starts as JSON: pairs of the step after which each began, and its value where it changed. What a
    start at `step` undoes is forgotten."""
    known = [pair for pair in json.loads(before.get("credits", "[]")) if pair[0] < step]
    return json.dumps(known if known and known[-1][1] == now["credit"] else [*known, [step, now["credit"]]])


def _changes(before: Facts, now: Facts) -> Iterator[tuple[str, _Fact]]:
    for name, fact in _MUST_BE_EQUAL.items():
        if before.get(name) != now.get(name):
            yield name, fact


def comparable(before: Facts, now: Facts, journal_file: Path) -> bool:
    """Return whether groups made under the facts `before` can be trained now. A new journal has no facts.

    Raises:
        ConfigError: they are of another model.
    """
    if not before:
        return True
    changed = list(_changes(before, now))
    for _, fact in changed:
        if fact.decides == "run":
            raise ConfigError(
                f"{fact.key} differs from that of {journal_file}; use the same one, or choose another run_dir"
            )
    return before.get("wire_schema") == str(SCHEMA_VERSION) and all(fact.decides != "groups" for _, fact in changed)


def check_same_batches(before: Facts, now: Facts, journal_file: Path) -> None:
    """Refuse batches, recorded under the facts `before`, that cannot be trained again now.

    Raises:
        ConfigError: the configuration does not fit them.
        JournalError: their groups are of another schema.
    """
    if (schema := before.get("wire_schema", "unknown")) != str(SCHEMA_VERSION):
        raise JournalError(
            f"{journal_file} has groups of protocol schema {schema}, this release reads {SCHEMA_VERSION}; use the "
            "release that wrote them"
        )
    if now.get("learns_from_rows") and before.get("dataset_digest") != now.get("dataset_digest"):
        raise ConfigError(
            "--from-journal: loss.ce_coef and loss.weights_column take what the dataset's rows have, and the dataset is another "
            "one than that of the run; give that one, or remove these keys"
        )
    for name, fact in _changes(before, now):
        raise ConfigError(
            f"--from-journal: {fact.key} is {now.get(name) or 'not given'}, the run was made with {before.get(name) or 'none'}"
        )


def dataset_change(before: Facts, now: Facts, journal_file: Path) -> str | None:
    """Return a warning if the dataset changed since the last start.

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
        f"the dataset, or a file with its functions, has changed since {journal_file} was written. Groups stay as they are. But "
        "first attempts of this epoch, returns and cooldowns are noted by the numbers of prompts. If rows have moved, stop and "
        "choose another run_dir"
    )
