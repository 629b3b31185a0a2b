"""The newest policy of a run that lies on its disk, and whether it can be asked here.

Guarantee: nothing is loaded, and every reason why not is a sentence with what to do.
"""

import importlib.util
import json
from pathlib import Path
from typing import NamedTuple

import psutil

from consumer.checkpoints.folders import CONFIG_FILE, newest_adapter
from protocol.errors import ConfigError
from protocol.wire.digests import base_model_digest
from replay.journal.reader import JournalReader
from tools.tables import size
from tools.view.scores.kept import ScoredBy
from tools.view.scores.questions import Policy

_BESIDE_BYTES = 3 * 2**30  # libraries, and one row of a group
_NO_POLICY = "the run has no checkpoint yet; the first one comes after trainer.save_steps steps"
_OLD = "the journal does not say how its groups were sampled"


class NoPolicyError(Exception):
    """There is none that can be asked here. The text says why."""


class NewestPolicy(NamedTuple):
    by: ScoredBy
    adapter: Path


def newest_policy(reader: JournalReader) -> NewestPolicy:
    """The one of the newest adapter in the run's folder, or `NoPolicyError`."""
    facts, run_dir = reader.facts(), reader.path.parent
    try:
        found = newest_adapter(run_dir, run_dir / "checkpoints")
        changed = (found[0] / CONFIG_FILE).stat().st_mtime_ns if found else 0
    except (OSError, ValueError, LookupError) as error:
        raise NoPolicyError(f"the newest checkpoint cannot be read ({error}); ask again") from error
    if found is None:
        raise NoPolicyError(_NO_POLICY)
    try:
        temperature = float(json.loads(facts["sampling"])["temperature"])
    except (LookupError, ValueError, TypeError):
        raise NoPolicyError(_OLD) from None
    folder, step = found
    policy = reader.policy_at(step)
    return NewestPolicy(ScoredBy(f"{step}-{changed}", policy.version if policy else 0, step, temperature), folder)


def loadable(newest: NewestPolicy, facts: dict[str, str]) -> tuple[Policy, int]:
    """What the child loads, and how many bytes of memory it may have; or `NoPolicyError`."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("peft") is None:
        raise NoPolicyError("torch and PEFT are not installed here; start rl-view where the trainer is installed")
    if facts.get("trust_remote_code") == "true":
        raise NoPolicyError(
            "the model brings Python files of its own, and rl-view runs no code that comes with a model"
        )
    base = Path(facts.get("model_path", ""))
    if not facts.get("model_path") or not base.is_dir():
        raise NoPolicyError(f"the base model is not here ({base}); start rl-view where the run has it")
    try:
        if base_model_digest(base) != facts.get("base_model_digest"):
            raise NoPolicyError(f"the model in {base} is not the run's base model")
    except ConfigError as error:
        raise NoPolicyError(str(error)) from error
    files = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    weights = files * (2 if facts.get("model_dtype") == "float32" else 1)  # the files may have half as many bytes
    needed, free = weights + _BESIDE_BYTES, psutil.virtual_memory().available
    if needed > free:
        raise NoPolicyError(f"the base model needs up to {size(needed)} of memory here, and {size(free)} are free")
    dtype, quantization = facts.get("model_dtype", "float32"), facts.get("quantization", "")
    policy = Policy(str(base), dtype, quantization, str(newest.adapter), newest.by.key)
    return policy, needed + files  # pages of the files count while they are read
