"""The completions of evaluations, in `RUN_DIR/held-out`, for people to read and compare.

Guarantee: a file has the answers of one evaluated version, as their producers sent them, at most `MAX_BYTES` of completions.
Files of the newest `NEWEST` versions and of the best are kept; steps that a crash undid leave none. A full disk costs the texts
and nothing else. Reading needs no torch, and of a damaged file there is nothing.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.decoding import UNREADABLE
from protocol.files.space import unless_full
from protocol.files.staged import staged
from protocol.wire.messages import Group

FOLDER = "held-out"
NEWEST, MAX_BYTES = 8, 32 * 2**20
_MOST_READ = 4 * MAX_BYTES
_NAME = "version-{}-step-{}.answers"


class KeptAnswer(msgspec.Struct, frozen=True):
    """One prompt of the held-out dataset. `frame` is the encoded group, empty where the prompt was given up or `MAX_BYTES` left
    no room; a prompt of which too few completions were scored has no score."""

    prompt_id: int
    score: float | None
    frame: bytes = b""


class _Evaluation(msgspec.Struct, frozen=True):
    version: int
    answers: list[KeptAnswer]


class KeptAnswers:
    """Belongs to the main thread. Files of steps after `first_step` are of no step that was taken."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._folder = run_dir / FOLDER
        if self._folder.is_dir():
            known = [(file, _numbers(file)) for file in self._folder.iterdir()]
            for file in [file for file, numbers in known if numbers is None or numbers[1] > first_step]:
                file.unlink(missing_ok=True)

    def write(self, version: int, step: int, answers: Sequence[KeptAnswer]) -> None:
        """`step` made the version."""
        with unless_full():
            self._folder.mkdir(exist_ok=True)
            with staged(self._folder / _NAME.format(version, step), durable=False) as partial:
                partial.write_bytes(msgspec.msgpack.encode(_Evaluation(version, list(answers))))

    def prune(self, best: int | None) -> None:
        """Keeps the newest, and the version `best`."""
        for version, file in list(kept_versions(self._folder.parent).items())[:-NEWEST]:
            if version != best:
                file.unlink(missing_ok=True)


def kept_versions(run_dir: Path) -> dict[int, Path]:
    """The files by version, the oldest first."""
    found = ((_numbers(file), file) for file in (run_dir / FOLDER).glob("*.answers"))
    return dict(sorted((numbers[0], file) for numbers, file in found if numbers))


def read_answers(file: Path) -> list[KeptAnswer]:
    """In the order of the prompts; none if the file is damaged, or gone meanwhile."""
    try:
        if file.stat().st_size > _MOST_READ:
            return []
        return msgspec.msgpack.decode(file.read_bytes(), type=_Evaluation).answers
    except (OSError, *UNREADABLE):
        return []


def num_bytes(group: Group) -> int:
    """What the answer takes of `MAX_BYTES`."""
    values = (getattr(group, name) for name in group.__struct_fields__)
    return sum(len(value) for value in values if isinstance(value, bytes))


def _numbers(file: Path) -> tuple[int, int] | None:
    """Version and step of a file of ours."""
    version, _, step = file.stem.removeprefix("version-").partition("-step-")
    return (int(version), int(step)) if file.suffix == ".answers" and version.isdigit() and step.isdigit() else None
