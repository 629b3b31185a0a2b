"""The versions that are to be evaluated, on the disk until their result is.

Guarantee: a version that is due is whole in `RUN_DIR/evaluation` before any producer hears of it, and stays until `done`. At
most two are there: the one that is being evaluated and the newest that became due meanwhile, in place of any between.
"""

import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from consumer.publishing.published_policy import MeasuredProbe, PublishedPolicy
from protocol.files.staged import staged
from protocol.wire.messages import PolicyInfo


class DueVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy to evaluate: the step that made it, its adapter blob, and its probe as a `PolicyOffer` has it."""

    policy: PolicyInfo
    step: int
    blob: bytes
    probe_ids: bytes = b""
    probe_logprobs: bytes = b""

    @property
    def published(self) -> PublishedPolicy:
        """As producers download it."""
        probe = MeasuredProbe(self.probe_ids, self.probe_logprobs)
        return PublishedPolicy(self.policy.version, self.policy.digest, self.blob, probe)


class EvaluationQueue:
    """`put` belongs to the publisher's thread, `begin` to the intake's, the rest to the main thread."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "evaluation"
        self._lock = threading.Lock()
        self._due: list[tuple[int, Path]] = []  # version, file
        self._begun: int | None = None  # version
        self.num_skipped = 0

    def restore(self, first_step: int, known: Iterable[int]) -> None:
        """Takes up what an earlier process left: not what is known already, and not of steps that will be taken again."""
        known = set(known)
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            version, _, step = file.stem.removeprefix("version-").partition("-step-")
            if file.suffix == ".adapter" and int(step) <= first_step and int(version) not in known:
                self._due.append((int(version), file))
            else:
                file.unlink()
        self._due.sort()
        self._skip()

    @property
    def versions(self) -> list[int]:
        with self._lock:
            return [version for version, _ in self._due]

    def put(self, due: DueVersion) -> None:
        """
        Raises:
            OSError: it could not be written.
        """
        version = due.policy.version
        file = self._folder / f"version-{version}-step-{due.step}.adapter"
        with staged(file) as partial:
            partial.write_bytes(msgspec.msgpack.encode(due))
        with self._lock:
            self._due = sorted([entry for entry in self._due if entry[0] != version] + [(version, file)])
            self._skip()

    def begin(self) -> DueVersion | None:
        """The version to evaluate now; None while there is none, or one is begun."""
        with self._lock:
            if self._begun is not None or not self._due:
                return None
            self._begun, file = self._due[0]
        return msgspec.msgpack.decode(file.read_bytes(), type=DueVersion)

    def done(self, version: int) -> None:
        """Its result is on the disk."""
        with self._lock:
            gone = [file for known, file in self._due if known == version]
            self._due = [entry for entry in self._due if entry[0] != version]
            if self._begun == version:
                self._begun = None
        for file in gone:
            file.unlink(missing_ok=True)

    def _skip(self) -> None:
        """Between what is being evaluated, or was when the process ended, and the newest there is no time for others."""
        for _, file in self._due[1:-1]:
            file.unlink(missing_ok=True)
            self.num_skipped += 1
        del self._due[1:-1]
