"""Files of evaluations: the versions that are due, the file of results, the best adapter, the newest answers.

Guarantee: a version that is due is whole in `RUN_DIR/evaluation` before any producer hears of it, and stays until `done`. At
most two are there: the one that is being evaluated and the newest that became due meanwhile, in place of any between.
`RUN_DIR/evaluations.jsonl` has one line per evaluation of the run that is, on the disk when `record` returns; steps that a crash
undid leave none. It and the older file that it replaced, `evaluations.1.jsonl`, are bounded (`protocol.runtime.json_lines`):
together they have the last ten thousands of evaluations, and scores are compared with those. `checkpoints/best` is whole or
absent: a plain PEFT adapter with `evaluation.json` beside it, the best that this run ever had, also of steps that a crash undid.
`record` may be repeated after a crash at any point.
"""

import json
import re
import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from consumer.evaluate.kept_answers import KeptAnswer, KeptAnswers
from consumer.link.policy_store import PublishedPolicy
from protocol.config.data import EvaluationSection
from protocol.runtime import json_lines as rotated_lines
from protocol.runtime.files import restore_folder, staged
from protocol.runtime.json_lines import RotatedLines, encode_line, encode_page
from protocol.wire.adapter_blob import Anchor, Unpack
from protocol.wire.adapter_blob import unpack as unpack_adapter
from protocol.wire.messages import PolicyInfo, Probe

_RESULT = "evaluation.json"
_LENGTH = struct.Struct("<Q")
_MAX_BYTES = 16 * 2**20  # of one file; a line has some 400 bytes
_DUE_FILE = re.compile(r"(\.)?version-(\d{1,19})-step-(\d{1,19})\.adapter(?(1)\.partial)")
_REMEMBERED = 1024  # versions; requests name only the newest


class EvaluationResults:
    """The results of a run, which belong to the main thread. An evaluation in which more than `max_unscored_share` of the prompts
    have no score is reported and nothing else. A result without an environment that the run skips is compared with such alone.
    Lines after `first_step` belong to steps that were undone. `unpack`
    writes the files of a policy."""

    def __init__(
        self,
        run_dir: Path,
        checkpoints_dir: Path,
        section: EvaluationSection,
        first_step: int,
        max_unscored_share: float,
        unpack: Unpack = unpack_adapter,
    ) -> None:
        self._file = RotatedLines(run_dir / "evaluations.jsonl", _MAX_BYTES)
        self._answers = KeptAnswers(run_dir, first_step)
        self._best = checkpoints_dir / "best"
        self._section = section
        self._max_unscored_share = max_unscored_share
        self._unpack = unpack
        self._file.forget_after(first_step)
        self.versions: list[int] = []  # the newest of those that have a result
        self.best_score: float | None = None  # of the valid results
        self._best_version: int | None = None
        self.num_without_improvement = (
            0  # evaluations since the last one that was more than `min_delta` above all before it
        )
        self._without: list[str] = []  # environments that the newest result leaves out
        for line in rotated_lines.read(self._file.path):
            self._note(line)
        restore_folder(self._best)

    @property
    def best(self) -> dict[str, Any] | None:
        """The result behind `checkpoints/best`, if its score can be compared with those to come."""
        try:
            found: dict[str, Any] = json.loads((self._best / _RESULT).read_text(encoding="utf-8"))
        except OSError:
            return None
        same = found["metric"] == self._section.score_name and found.get("without", []) == self._without
        return found if same else None

    @property
    def stop_reason(self) -> str | None:
        """The reason to end the run now; None: there is none."""
        patience = self._section.patience
        if patience is None or (streak := self.num_without_improvement) < patience:
            return None
        return (
            f"{streak} evaluations in a row were no improvement on {self._section.score_name} {self.best_score:.4g} "
            "(evaluation.patience)"
        )

    def is_valid(self, result: dict[str, Any]) -> bool:
        """Return whether enough of the prompts have a score, by the metric of this process."""
        unscored = result["num_prompts"] - result["num_scored"]
        enough = result["score"] is not None and unscored <= self._max_unscored_share * result["num_prompts"]
        return bool(enough and result["metric"] == self._section.score_name)

    def record(
        self, result: dict[str, Any], blob: bytes, answers: Sequence[KeptAnswer] = (), anchor: Anchor | None = None
    ) -> bool:
        """Keep the answers, and the adapter or patch if it is the best, then write the line. Return whether it is the best. On an
        OSError nothing was recorded."""
        if answers:
            self._answers.write(result["version"], result["step"], answers)
        self._compare_without(result)
        best = self.best
        is_best = self.is_valid(result) and (best is None or result["score"] > best["score"])
        if is_best and self._section.keep_best:
            self._keep(result, blob, anchor)
        self._file.append(f"{encode_line(result)}\n".encode(), durable=True)
        self._note(result)
        self._answers.prune(self._best_version)
        return is_best

    def _note(self, result: dict[str, Any]) -> None:
        """Take the numbers that the run needs again; the file has the others."""
        self._compare_without(result)
        self.versions.append(int(result["version"]))
        del self.versions[:-_REMEMBERED]
        if self.is_valid(result):
            score, best = result["score"], self.best_score
            improved = best is None or score > best + self._section.min_delta
            self.num_without_improvement = 0 if improved else self.num_without_improvement + 1
            if best is None or score > best:
                self.best_score, self._best_version = score, int(result["version"])

    def _compare_without(self, result: dict[str, Any]) -> None:
        """Forget the scores before, where the result leaves other environments out."""
        without = result.get("without", [])
        if without != self._without:
            self._without, self.best_score, self._best_version, self.num_without_improvement = without, None, None, 0

    def _keep(self, result: dict[str, Any], blob: bytes, anchor: Anchor | None) -> None:
        with staged(self._best) as partial:
            self._unpack(blob, result["digest"], partial, anchor)
            (partial / _RESULT).write_text(encode_page(result), encoding="utf-8")


class DueVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy to evaluate: the step that made it, its blob, its probe as a `PolicyOffer` has it, and its anchor. In a file the
    blobs, which may be larger than msgpack's 4 GiB, stand behind all else and its length."""

    policy: PolicyInfo
    step: int
    blob: bytes
    probe: Probe | None = None
    anchor: tuple[str, bytes] | None = None

    @property
    def published(self) -> PublishedPolicy:
        """The policy as producers download it."""
        anchor = Anchor(*self.anchor) if self.anchor else None
        return PublishedPolicy(self.policy.version, self.policy.digest, self.blob, self.probe, anchor=anchor)

    def write(self, path: Path) -> None:
        digest, below = self.anchor or ("", b"")
        head = msgspec.msgpack.encode(structs.replace(self, blob=b"", anchor=(digest, b"") if self.anchor else None))
        with path.open("wb") as file:
            for part in (_LENGTH.pack(len(head)), head, self.blob, below):
                file.write(part)

    @classmethod
    def read(cls, path: Path) -> "DueVersion":
        with path.open("rb") as file:
            [length] = _LENGTH.unpack(file.read(_LENGTH.size))
            head = msgspec.msgpack.decode(file.read(length), type=cls)
            blob, below = file.read(head.policy.num_bytes), file.read()
        return structs.replace(head, blob=blob, anchor=head.anchor and (head.anchor[0], below))


class EvaluationQueue:
    """The versions that are due, on the disk and, until they begin, in memory: the intake's thread reads no file.

    `put` belongs to the publisher's thread, `begin` and `next` to the intake's, the rest to the main thread.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "evaluation"
        self._lock = threading.Lock()
        self._due: dict[int, Path] = {}  # files by version
        self._waiting: dict[int, DueVersion] = {}  # by version, those that have not begun
        self._begun: int | None = None  # version
        self.num_skipped = 0

    def restore(self, first_step: int, known: Iterable[int]) -> None:
        """Take up what an earlier process left: not what is known already, and not of steps that will be taken again. What
        is not the queue's is left alone."""
        known = set(known)
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            if found := _DUE_FILE.fullmatch(file.name):
                half, version, step = found[1], int(found[2]), int(found[3])
                if half or step > first_step or version in known:
                    file.unlink()
                else:
                    self._due[version] = file
        self._skip()
        for version, file in self._due.items():
            self._waiting[version] = DueVersion.read(file)

    @property
    def versions(self) -> list[int]:
        with self._lock:
            return list(self._due)

    def put(self, due: DueVersion) -> None:
        """Raise OSError if it could not be written."""
        version = due.policy.version
        file = self._folder / f"version-{version}-step-{due.step}.adapter"
        with staged(file) as partial:
            due.write(partial)
        with self._lock:
            self._due[version], self._waiting[version] = file, due
            self._skip()

    @property
    def next(self) -> DueVersion | None:
        """The first version that has not begun."""
        with self._lock:
            return next((self._waiting[version] for version in self._due if version in self._waiting), None)

    def begin(self) -> DueVersion | None:
        """The version to evaluate now; None while there is none, or one is begun."""
        with self._lock:
            if self._begun is not None or not self._due:
                return None
            self._begun = next(iter(self._due))
            return self._waiting.pop(self._begun)

    def done(self, version: int) -> None:
        """Delete a version whose result is on the disk."""
        with self._lock:
            file = self._due.pop(version, None)
            self._waiting.pop(version, None)
            if self._begun == version:
                self._begun = None
        if file is not None:
            file.unlink(missing_ok=True)

    def _skip(self) -> None:
        """Between what is being evaluated, or was when the process ended, and the newest there is no time for others."""
        self._due = dict(sorted(self._due.items()))
        for version in list(self._due)[1:-1]:
            self._due.pop(version).unlink(missing_ok=True)
            self._waiting.pop(version, None)
            self.num_skipped += 1
