"""Files of a step that was not finite, in `RUN_DIR/inspect/step-N`.

Guarantee: `step.json` says what was found and names the groups, `groups.safetensors` holds their arrays under `ID/NAME` (no
pickle). The folder appears whole; a full disk costs the folder and nothing else. Folders of the newest eight steps are kept.
What else lies there is left alone.
"""

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch.distributed.tensor import DTensor

from protocol.runtime.files import ignore_disk_full, staged
from protocol.runtime.json_lines import encode_page
from replay.batch_selection import TrainingBatch
from replay.groups import RolloutGroup

_ARRAYS = ("prompt_ids", "completion_lengths", "completion_ids", "logprobs", "rewards", "versions")
_MAX_NAMES = 16
_KEPT = 8
_NAME, _STEP = re.compile(r"step-\d+"), "step.json"


def keep(run_dir: Path, step: int, batch: TrainingBatch, found: dict[str, Any]) -> Path:
    """Write the folder of optimizer step `step` (from 1), in place of one from an earlier try, and return it."""
    folder = run_dir / "inspect" / f"step-{step}"
    values = {"step": step} | found | {"groups": [_row(group) for group in batch.groups]}
    arrays = {
        f"{group.lease_id}/{name}": np.ascontiguousarray(getattr(group, name))
        for group in batch.groups
        for name in _ARRAYS
    }
    with ignore_disk_full():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with staged(folder) as partial:
            partial.mkdir()
            (partial / _STEP).write_text(encode_page(values), encoding="utf-8")
            # Errors of `save_file` do not say that the disk is full.
            (partial / "groups.safetensors").write_bytes(save(arrays))
    places = folder.parent.glob("step-*")
    kept = [place for place in places if _NAME.fullmatch(place.name) and (place / _STEP).is_file()]
    for old in sorted(kept, key=lambda place: place.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(old)
    return folder


def _row(group: RolloutGroup) -> dict[str, Any]:
    return {
        "group": group.lease_id,
        "policy_version": group.policy_version,
        "num_tokens": group.num_tokens,
        "num_unscored_tokens": int(np.isnan(group.logprobs).sum()),
        "rewards": group.rewards.tolist(),
    }


def not_finite(
    named: Iterable[tuple[str, torch.nn.Parameter]], what: Callable[[torch.nn.Parameter], torch.Tensor | None]
) -> list[str]:
    """Name the parameters, the first few, whose tensor is not finite everywhere. `what` takes the tensor; None where there is
    none."""
    found = []
    for name, parameter in named:
        tensor = what(parameter)
        if isinstance(tensor, DTensor):  # of this rank its part: the others are not here to gather the rest
            tensor = tensor.to_local()
        if tensor is not None and not bool(tensor.isfinite().all()):
            found.append(name)
            if len(found) == _MAX_NAMES:
                break
    return found
