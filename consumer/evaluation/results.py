"""What evaluations came to: the file of results, the best adapter, and whether the run should go on.

Guarantee: `RUN_DIR/evaluations.jsonl` has one line per evaluation of the run that is, on the disk when `record` returns; steps
that a crash undid leave none. `checkpoints/best` is whole or absent: a plain PEFT adapter with `evaluation.json` beside it, the
best that this run ever had, also of steps that a crash undid. `record` may be repeated after a crash at any point.
"""

import json
import os
from pathlib import Path
from typing import Any

from protocol.config.sections.evaluation import EvaluationSection
from protocol.files.json_lines import append, encode_line, encode_page, forget_after, open_to_append
from protocol.files.staged import mend, staged, sync
from protocol.wire.adapter_blob import unpack

_RESULT = "evaluation.json"


class EvaluationResults:
    """Belongs to the main thread.

    Args:
        first_step: steps taken before this process.
        max_unscored_share: an evaluation of which more than this share of the prompts has no score is reported and nothing else.
    """

    def __init__(
        self,
        run_dir: Path,
        checkpoints_dir: Path,
        section: EvaluationSection,
        first_step: int,
        max_unscored_share: float,
    ) -> None:
        self._file = run_dir / "evaluations.jsonl"
        self._best = checkpoints_dir / "best"
        self._section = section
        self._max_unscored_share = max_unscored_share
        forget_after(self._file, first_step)
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        self.versions: list[int] = []  # those that have a result
        self.best_score: float | None = None  # of the valid results
        self.num_without_improvement = (
            0  # evaluations since the last one that was more than `min_delta` above all before it
        )
        for line in lines:
            self._note(json.loads(line))
        mend(self._best)

    @property
    def best(self) -> dict[str, Any] | None:
        """What `checkpoints/best` is, if its score can be compared with those to come."""
        try:
            found: dict[str, Any] = json.loads((self._best / _RESULT).read_text(encoding="utf-8"))
        except OSError:
            return None
        return found if found["metric"] == self._section.score_name else None

    @property
    def stop_reason(self) -> str | None:
        """Why the run should end now, if it should."""
        patience = self._section.patience
        if patience is None or (streak := self.num_without_improvement) < patience:
            return None
        return (
            f"{streak} evaluations in a row were no improvement on {self._section.score_name} {self.best_score:.4g} "
            "(evaluation.patience)"
        )

    def is_valid(self, result: dict[str, Any]) -> bool:
        """Whether enough of the prompts have a score, and it is one of the metric of now."""
        unscored = result["num_prompts"] - result["num_scored"]
        enough = result["score"] is not None and unscored <= self._max_unscored_share * result["num_prompts"]
        return bool(enough and result["metric"] == self._section.score_name)

    def record(self, result: dict[str, Any], blob: bytes) -> bool:
        """Keeps the adapter if it is the best, then writes the line. Returns whether it is the best.

        Raises:
            OSError: no room, for one; nothing was recorded then.
        """
        best = self.best
        is_best = self.is_valid(result) and (best is None or result["score"] > best["score"])
        if is_best and self._section.keep_best:
            self._keep(result, blob)
        file = open_to_append(self._file)
        try:
            append(file, f"{encode_line(result)}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
        sync(self._file.parent)
        self._note(result)
        return is_best

    def _note(self, result: dict[str, Any]) -> None:
        """Takes the numbers that the run needs again; the file has the others."""
        self.versions.append(int(result["version"]))
        if self.is_valid(result):
            score, best = result["score"], self.best_score
            improved = best is None or score > best + self._section.min_delta
            self.num_without_improvement = 0 if improved else self.num_without_improvement + 1
            self.best_score = score if best is None else max(best, score)

    def _keep(self, result: dict[str, Any], blob: bytes) -> None:
        with staged(self._best) as partial:
            unpack(blob, result["digest"], partial)
            (partial / _RESULT).write_text(encode_page(result), encoding="utf-8")
