"""Evaluations as the run sees them: which versions are due, what is done with results, when the run has seen enough.

Guarantee: no step waits for an evaluation; only the end of the run does, within `evaluation.wait_s` without an answer. Every
result is recorded once (`consumer.evaluate.results`), said once, and reaches the trackers under `evaluation/`.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consumer.evaluate.evaluation import Evaluation, by_source, scores_of_sources, summary
from consumer.evaluate.leases import EvaluationLeases
from consumer.evaluate.results import DueVersion, EvaluationQueue, EvaluationResults
from consumer.link.policy_store import PublishedPolicy
from consumer.waiting import Limit, WaitPolicy
from protocol.config.data import EvaluationSection
from protocol.errors import StalledError
from protocol.runtime.files import out_of_space
from replay.sources import ONE, Sources

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1


@dataclass(eq=False)
class EvaluationControl:
    """`submit` belongs to the publisher's thread, the rest to the main thread; numbers may be read by any."""

    section: EvaluationSection
    due: EvaluationQueue
    results: EvaluationResults
    leases: EvaluationLeases
    run_dir: Path
    reward_names: tuple[str, ...]
    last_version: int  # of the run, if it takes every step
    say: Callable[..., None]  # shows a line to the user, with its numbers as fields
    last: dict[str, Any] | None = None
    totals: Counter[str] = field(default_factory=Counter)
    sources: Sources = ONE  # of the held-out prompts

    def submit(self, policy: PublishedPolicy, step: int) -> None:
        """A policy is about to be published: it is to be evaluated if it is due and has no result. Raises OSError if it could
        not be written."""
        version = policy.version
        if version in self.results.versions:
            return
        due = version % self.section.every_versions == 0 if version else self.section.before_training
        if due or version == self.last_version:
            anchor = policy.anchor and (policy.anchor.digest, bytes(policy.anchor.data))
            self.due.put(DueVersion(policy.info, step, bytes(policy.data), policy.probe, anchor))

    def collect(self, log: Callable[[Mapping[str, float]], None]) -> None:
        """Record what has finished, and send its numbers to the trackers by `log`. On a full disk the next call does."""
        while not self.leases.finished.empty():
            if not self._record(self.leases.finished.get_nowait(), log):
                return

    def wait_for_last(
        self, waits: WaitPolicy, describe: Callable[[], str], log: Callable[[Mapping[str, float]], None]
    ) -> None:
        """Return when every version that is due has its result, or nothing came in for too long; raise what `waits.check`
        raises."""

        def attempt() -> bool | None:
            self.collect(log)
            return None if self.due.versions else True

        def status() -> str:
            at = self.leases.progress
            return f"v{at.version}: {at.num_done} of {at.num_prompts} prompts; {describe()}"

        try:
            waits.wait_until(
                attempt, "the last evaluation", status, pause_s=_PAUSE_S,
                limit=Limit(self.section.wait_s, "evaluation.wait_s"),
                progress=lambda: (self.leases.progress, len(self.due.versions)),
            )  # fmt: skip
        except StalledError:
            versions = ", ".join(f"v{version}" for version in self.due.versions)
            self.say(
                f"the evaluation of {versions} is given up after evaluation.wait_s without an answer: {describe()}"
            )

    def _record(self, finished: Evaluation, log: Callable[[Mapping[str, float]], None]) -> bool:
        """Record a result. False: no room on the disk, so it is tried again."""
        policy = finished.due.policy
        result = {
            "version": policy.version,
            "step": finished.due.step,
            "t": time.time(),
            "metric": self.section.score_name,
            **summary(finished.answers(), self.reward_names),
            **by_source(finished.kept(), self.sources),
            **({"without": list(finished.without)} if finished.without else {}),
            "duration_s": round(finished.duration_s, 3),
            "digest": policy.digest,
        }
        try:
            is_best = self.results.record(result, finished.due.blob, finished.kept(), finished.due.published.anchor)
        except OSError as error:
            if not out_of_space(error, self.run_dir):
                raise
            self.leases.finished.put(finished)
            return False
        self.due.done(policy.version)
        self.last = result
        self.totals["scored" if self.results.is_valid(result) else "incomplete"] += 1
        self._report(result, is_best)
        log(_tracked(result))
        return True

    def _report(self, result: dict[str, Any], is_best: bool) -> None:
        score, unscored = result["score"], result["num_prompts"] - result["num_scored"]
        shown = "no score" if score is None else f"{result['metric']} {score:.4g}"
        notes = [f"{name} {value:.4g}" for name, value in scores_of_sources(result).items()]
        notes += [f"{result['num_prompts']} prompts", f"{result['duration_s']:.1f} s"]
        if without := result.get("without"):
            notes.append(f"without {', '.join(without)}, which the run skips")
        if unscored:
            notes.append(f"{unscored} without a score")
        if not self.results.is_valid(result):
            notes.append("too few to count")
        else:
            notes.append("the best so far" if is_best else f"best {self.results.best_score:.4g}")
        fields = {"version": result["version"], "step": result["step"], "score": score, "best": is_best}
        self.say(f"evaluation of v{result['version']} (step {result['step']}): {shown} ({', '.join(notes)})", **fields)


def _tracked(result: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result, under the names that trackers show."""
    numbers = {name: result[name] for name in ("score", "version", "mean_length")}
    numbers |= {f"rewards/{name}": value for name, value in result["rewards"].items()}
    numbers |= {f"sources/{name}": value for name, value in scores_of_sources(result).items()}
    numbers["mean_of_sources"] = result.get("mean_of_sources")
    return {f"evaluation/{name}": float(value) for name, value in numbers.items() if value is not None}
