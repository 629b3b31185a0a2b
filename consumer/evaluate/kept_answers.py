"""The completions of evaluations, in `RUN_DIR/held-out`, for people to read and compare.

Guarantee: a file has the answers of one evaluated version, as their producers sent them, at most `MAX_BYTES` of completions.
Files of the newest `NEWEST` versions and of the best are kept; steps that a crash undid leave none. A full disk costs the texts
and nothing else. Files of other names are left alone. Reading needs no torch, and of a damaged file there is nothing.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.errors import UNREADABLE
from protocol.runtime.files import ignore_disk_full, staged

FOLDER = "held-out"
NEWEST, MAX_BYTES = 8, 32 * 2**20
_MOST_READ = 4 * MAX_BYTES
_NAME = "version-{}-step-{}.answers"
_FILE = re.compile(r"(?P<half>\.)?version-(?P<version>\d{1,19})-step-(?P<step>\d{1,19})\.answers(?(half)\.partial)")


class KeptAnswer(msgspec.Struct, frozen=True):
    """A prompt of the held-out dataset. `frame` is the encoded group, empty where the prompt failed or `MAX_BYTES` left
    no room; a prompt with too few scored completions has no score."""

    prompt_id: int
    score: float | None
    frame: bytes = b""


class _Evaluation(msgspec.Struct, frozen=True):
    version: int
    answers: list[KeptAnswer]


class KeptAnswers:
    """The files of answers, which belong to the main thread. Files of steps after `first_step` are of no step that was taken."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._folder = run_dir / FOLDER
        for file in list(self._folder.iterdir()) if self._folder.is_dir() else ():
            found = _FILE.fullmatch(file.name)
            if found and (found["half"] or int(found["step"]) > first_step):
                file.unlink(missing_ok=True)

    def write(self, version: int, step: int, answers: Sequence[KeptAnswer]) -> None:
        """`step` made the version."""
        with ignore_disk_full():
            self._folder.mkdir(exist_ok=True)
            with staged(self._folder / _NAME.format(version, step), durable=False) as partial:
                partial.write_bytes(msgspec.msgpack.encode(_Evaluation(version, list(answers))))

    def prune(self, best: int | None) -> None:
        """Delete all files but those of the newest versions and of version `best`."""
        for version, file in list(kept_versions(self._folder.parent).items())[:-NEWEST]:
            if version != best:
                file.unlink(missing_ok=True)


def kept_versions(run_dir: Path) -> dict[int, Path]:
    """The files by version, the oldest first."""
    found = ((_FILE.fullmatch(file.name), file) for file in (run_dir / FOLDER).glob("version-*.answers"))
    return dict(sorted((int(name["version"]), file) for name, file in found if name))


def read_answers(file: Path) -> list[KeptAnswer]:
    """Return the answers in the order of the prompts; none if the file is damaged, or gone meanwhile."""
    try:
        if file.stat().st_size > _MOST_READ:
            return []
        return msgspec.msgpack.decode(file.read_bytes(), type=_Evaluation).answers
    except (OSError, *UNREADABLE):
        return []
