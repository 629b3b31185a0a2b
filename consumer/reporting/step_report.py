"""What a run says about itself while it runs: a progress bar, one line per step in `steps.jsonl`, and TRL's metrics.

Guarantee: every optimizer step leaves exactly one line in `RUN_DIR/steps.jsonl`, written when the step ends or, on a full
disk, when there is room; steps that a crash undid leave none. The file and the older one that it replaced, `steps.1.jsonl`,
are bounded (`protocol.runtime.json_lines`): together they have the last hundred thousand steps or more.
"""

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from consumer.reporting.learning_metrics import LearningMetrics
from protocol.runtime import logs
from protocol.runtime.files import unless_full
from protocol.runtime.json_lines import RotatedLines, encode_line
from replay.batches.cutting import CutBatch
from replay.batches.delivery import Arrival
from replay.rewards import weighted_sums

logger = logging.getLogger(__name__)

_MAX_BYTES = 256 * 2**20  # of one file; a step's line has some 2.5 kB


def batch_metrics(batch: CutBatch, version: int, weights: np.ndarray, names: list[str]) -> dict[str, float]:
    """Numbers about the rollouts of one step, under TRL's names where TRL has the number.

    Rewards and lengths are of everything that arrived since the last step, so that they describe the policy and not the
    selection for training; staleness is of the groups that are trained for the first time, against `version`, the policy
    that cut them, and of a group that of its oldest token; replayed groups have an age of their own.
    """
    arrivals = batch.arrivals or [Arrival.of(group) for group in batch.groups]
    rewards = np.concatenate([arrival.rewards for arrival in arrivals])
    total = weighted_sums(rewards, weights)
    total = total[~np.isnan(total)]
    lengths = np.concatenate([arrival.lengths for arrival in arrivals])
    ages = [version - group.policy_version for group in batch.groups]
    staleness, replayed = ages[: batch.num_fresh], ages[batch.num_fresh :]
    fresh = batch.groups[: batch.num_fresh]
    sampled = np.concatenate([group.is_sampled for group in fresh])
    versions = np.concatenate([group.versions for group in fresh])[sampled]
    oldest = np.repeat([group.policy_version for group in fresh], [group.num_tokens for group in fresh])[sampled]
    metrics = {
        "reward": float(total.mean()) if len(total) else float("nan"),
        "reward_std": float(total.std(ddof=1)) if len(total) > 1 else 0.0,
        "frac_reward_zero_std": sum(arrival.outcome == "no_signal" for arrival in arrivals) / len(arrivals),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.concatenate([arrival.truncated for arrival in arrivals]).mean()),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": float(max(staleness)),
        "staleness/token_mean": float(version - versions.mean()),
        "staleness/newer_token_share": float((versions > oldest).mean()),
        "replay/share": len(replayed) / len(ages),
    }
    if replayed:
        metrics |= {"replay/age/mean": float(np.mean(replayed)), "replay/age/max": float(max(replayed))}
    for column, name in enumerate(names):
        values = rewards[:, column][~np.isnan(rewards[:, column])]
        if len(values):
            metrics[f"rewards/{name}/mean"] = float(values.mean())
            metrics[f"rewards/{name}/std"] = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return metrics


def success_rates(counts: Mapping[str, int]) -> dict[str, float]:
    """Of all scored completions so far, by the attempt at their prompt: 1 is the first attempt, 2 the first reroll."""
    scored = {name.removesuffix("_scored"): count for name, count in counts.items() if name.endswith("_scored")}
    return {
        f"success_rate/{attempt}": counts[f"{attempt}_successes"] / count for attempt, count in scored.items() if count
    }


class StepReport:
    """Writes `steps.jsonl`, moves the bar or says a line, sets the metrics."""

    def __init__(
        self,
        run_dir: Path,
        counts: Mapping[str, int],
        metrics: LearningMetrics,
        *,
        max_steps: int,
        first_step: int,
        show_bar: bool,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = RotatedLines(run_dir / "steps.jsonl", _MAX_BYTES)
        self._file.forget_after(first_step)  # steps that were trained, but are not in the checkpoint
        self._unwritten: list[bytes] = []
        self._counts = counts
        self._metrics = metrics
        self._max_steps = max_steps
        self._as_records = logs.structured()
        self._show_lines = show_bar and (self._as_records or not sys.stderr.isatty())
        self._bar = tqdm(
            total=max_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not show_bar or self._show_lines,
        )

    def batch(self, staleness: list[int]) -> None:
        """A batch was cut; `staleness` of its groups that are trained for the first time, in versions."""
        self._metrics.batch(staleness)

    def logged(self, numbers: Mapping[str, float]) -> None:
        """What transformers logged of a step."""
        self._metrics.logged(numbers)

    def step(self, step: int, metrics: dict[str, float], *, wait_s: float, step_s: float, tokens: int) -> None:
        """Records optimizer step `step`, counted from 1, for whose batch the trainer waited `wait_s` seconds."""
        now, spent = time.time(), {"wait_s": wait_s, "step_s": step_s, "tokens": tokens}
        self._metrics.step(step, now, metrics, wait_s=wait_s, step_s=step_s, tokens=tokens)
        counts = dict(self._counts)  # a copy: the intake's thread adds names to it
        totals = {**success_rates(counts), "counts": counts}
        self._unwritten.append(f"{encode_line({'step': step, 't': now} | spent | metrics | totals)}\n".encode())
        self._write()
        whole_s = max(1e-9, wait_s + step_s)
        fields = spent | {
            "step": step,
            "max_steps": self._max_steps,
            "reward": metrics["reward"],
            "staleness": metrics["staleness/mean"],
            "tokens_per_s": tokens / whole_s,
            "wait_share": wait_s / whole_s,
        }
        shown = {
            "reward": f"{fields['reward']:.3f}",
            "staleness": f"{fields['staleness']:.2f}",
            "tok/s": f"{fields['tokens_per_s']:.0f}",
            "wait": f"{fields['wait_share']:.0%}",
        }
        self._bar.update(step - self._bar.n)
        self._bar.set_postfix(shown, refresh=False)
        if self._show_lines:
            numbers = "  ".join(f"{name} {value}" for name, value in shown.items())
            self.say(f"step {step}/{self._max_steps}  {numbers}", **fields)

    def say(self, text: str, **fields: Any) -> None:
        """A message that does not tear the bar; a record with these fields where logs are JSON."""
        if self._as_records:
            logger.info("%s", text, extra={"fields": fields})
        else:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
        self._write()

    def _write(self) -> None:
        with unless_full():
            while self._unwritten:
                self._file.append(self._unwritten[0])
                del self._unwritten[0]
