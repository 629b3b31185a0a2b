"""Some completions of every step as text, in `RUN_DIR/rollouts.jsonl`.

Guarantee: which ones is a function of seed, step and batch: one of the best rewarded, one of the worst, then any others.
The file and the older one that it replaced, `rollouts.1.jsonl`, are bounded (`protocol.runtime.json_lines`); steps that a crash
undid leave no lines; a full disk costs lines and nothing else.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumer.learn.micro_batches import BatchRecipe
from protocol.config.run import RunConfig
from protocol.runtime.files import ignore_disk_full
from protocol.runtime.json_lines import RotatedLines, encode_line
from replay.advantages import weighted_sums
from replay.batch_selection import TrainingBatch

_MAX_CHARS = 8192  # of a text


class RolloutLog:
    """The file of sampled rollouts. Lines of one step stay together, also where they alone are more than a file may have. Lines
    of steps after `first_step` are of no step that was taken."""

    def __init__(
        self, config: RunConfig, recipe: BatchRecipe, decode: Callable[[list[int]], str], first_step: int
    ) -> None:
        settings = config.observability
        self._file = RotatedLines(Path(config.run_dir) / "rollouts.jsonl", settings.rollouts_max_bytes)
        self._file.forget_after(first_step)
        self._num_samples = settings.rollout_samples
        self._reward_names = config.reward_names
        self._recipe = recipe
        self._decode = decode

    def note(self, step: int, batch: TrainingBatch, advantages: NDArray[np.float64], version: int) -> None:
        """Write the samples of optimizer step `step`, counted from 1, whose batch policy `version` cut. `advantages` (N,) are
        those of its completions."""
        if not self._num_samples:
            return
        rewards = np.concatenate([group.rewards for group in batch.groups])
        totals = weighted_sums(rewards, self._recipe.rewards.weights)
        now = time.time()
        lines = [
            {"step": step, "t": now}
            | self._completion(batch, row, version)
            | {"reward": float(totals[row]), "advantage": float(advantages[row])}
            for row in chosen(totals, self._num_samples, np.random.default_rng([self._recipe.seed, step]))
        ]
        with ignore_disk_full():
            self._file.append("".join(f"{encode_line(line)}\n" for line in lines).encode())

    def _completion(self, batch: TrainingBatch, row: int, version: int) -> dict[str, Any]:
        place, number = divmod(row, self._recipe.num_generations)
        group = batch.groups[place]
        tokens = group.last_record(number)
        return {
            "group": group.lease_id,
            "prompt_id": group.lease.key.prompt_id,
            "policy_version": group.policy_version,
            "staleness": version - group.policy_version,
            "versions": group.tokens_by_version(tokens),
            "stands_in": place >= batch.num_fresh,
            "prompt": shortened(self._decode(group.prompt_ids.tolist())),
            "completion": shortened(self._decode(group.completion_ids[tokens].tolist())),
            "length": int(group.sampled_lengths[number]),
            "truncated": bool(group.was_truncated[number]),
            "rewards": dict(zip(self._reward_names, group.rewards[number].tolist(), strict=True)),
        }


def chosen(totals: NDArray[np.float64], count: int, draw: np.random.Generator) -> list[int]:
    """Return indexes of at most `count` completions: a best one, a worst one, then others. NaN is neither."""
    order = draw.permutation(len(totals)).tolist()
    scored = [row for row in order if not np.isnan(totals[row])]
    extremes = [max(scored, key=totals.__getitem__), min(scored, key=totals.__getitem__)] if scored else []
    return list(dict.fromkeys([*extremes, *order]))[:count]


def shortened(text: str) -> str:
    """Shorten to about `_MAX_CHARS`: the middle of a longer one is left out, because answers stand at the end."""
    left_out = len(text) - _MAX_CHARS
    half = _MAX_CHARS // 2
    return text if left_out <= 0 else f"{text[:half]}[... {left_out} characters left out ...]{text[-half:]}"
