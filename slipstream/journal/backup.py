"""`slipstream journal backup` copies a run as it is now, while its trainer goes on.

Guarantee: the folder appears under its name when it is complete and on the disk, or not at all. `rl-trainer --resume` goes on
from it as from the original after a crash: its journal holds every group that its checkpoint, or a start from scratch, needs. It
also has every result of an evaluation, the answers that are kept, every version that waits for one, and the best adapter.
"""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from consumer.evaluate.kept_answers import FOLDER as HELD_OUT
from consumer.evaluate.kept_answers import kept_versions
from consumer.learn import checkpoints as checkpoints
from consumer.prompts.generated import ROWS
from protocol.config.loader import RESOLVED_FILE
from protocol.errors import JournalError
from protocol.runtime.files import aside, staged
from protocol.runtime.json_lines import opened
from replay.journal.reader import JournalReader
from slipstream.run_reader import EVALUATIONS, ROLLOUTS, STEPS
from slipstream.tables import size, write_line

_ATTEMPTS = 5
_LINES = (STEPS, ROLLOUTS)
_FOLDERS = ("checkpoints/best", "adapter", "model", "sft", ROWS)


def backup(reader: JournalReader, to: Path) -> None:
    """`JournalError` if `to` exists or cannot be written, or checkpoints come and go faster than they are copied."""
    try:
        if to.exists():
            raise JournalError(f"--to {to}: exists already; choose a new folder")
        with staged(to) as partial:
            for _ in range(_ATTEMPTS):
                shutil.rmtree(partial, ignore_errors=True)
                if _copy(reader, partial):
                    break
            else:
                raise JournalError(
                    f"the trainer replaced a checkpoint in each of {_ATTEMPTS} attempts to copy it; raise "
                    "trainer.save_total_limit or trainer.save_steps"
                )
    except OSError as error:
        # That of a folder's copy lists its files, each with where it is, where it goes and why not.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error
        raise JournalError(f"--to {to}: cannot be written: {why}; choose another place") from error
    found = checkpoints.latest(to / "checkpoints")
    start = f"checkpoint-{found.step}" if found else "no checkpoint"
    write_line(f"{start} and a journal of {size((to / reader.path.name).stat().st_size)} in {to}")
    write_line(f"go on from it: rl-trainer --resume --set run_dir={to} ...")


def _copy(reader: JournalReader, to: Path) -> bool:
    """Copy into `to`. Returns False if that has to be done again.

    The order matters. The checkpoint is copied first: a resumed run forgets what came after it, but needs the groups that the
    journal keeps for it, and these are there if the checkpoint still exists when the journal has been copied. A version is
    removed from `evaluation/` after its line is written, and the best adapter is replaced before that; so the versions are copied
    first, then the lines, then the best adapter.
    """
    run_dir = reader.path.parent
    found = checkpoints.latest(run_dir / "checkpoints")
    (to / "checkpoints").mkdir(parents=True)
    if found is not None:
        try:
            shutil.copytree(found.folder, to / "checkpoints" / found.folder.name)
        except (FileNotFoundError, shutil.Error):
            if checkpoints.is_committed(found.folder):
                raise
            return False
    (to / "evaluation").mkdir()
    _copy_files((run_dir / "evaluation").glob("*.adapter"), to / "evaluation")
    _copy_lines(run_dir / EVALUATIONS, to)
    _copy_files([run_dir / "trainer.json", run_dir / RESOLVED_FILE], to)
    if not all(_copy_folder(run_dir / name, to / name) for name in _FOLDERS):
        return False
    if answers := list(kept_versions(run_dir).values()):
        (to / HELD_OUT).mkdir()
        _copy_files(answers, to / HELD_OUT)
    for name in _LINES:
        _copy_lines(run_dir / name, to)
    reader.copy_to(to / reader.path.name)
    if found is None:
        return checkpoints.latest(run_dir / "checkpoints") is None
    return checkpoints.is_committed(found.folder)


def _copy_files(files: Iterable[Path], to: Path) -> None:
    """Return the files that are still there."""
    for file in files:
        with suppress(FileNotFoundError):
            shutil.copy2(file, to / file.name)


def _copy_lines(path: Path, to: Path) -> None:
    with opened(path) as files:
        for lines in files:
            with (to / Path(lines.name).name).open("wb") as copy:
                shutil.copyfileobj(lines, copy)


def _copy_folder(folder: Path, to: Path) -> bool:
    """Copy a folder that is replaced in two renames, between which nothing has its name. Returns False if it was replaced
    meanwhile."""
    for source in (folder, aside(folder), folder):
        with suppress(FileNotFoundError):
            before = source.stat()
            try:
                shutil.copytree(source, to)
            except shutil.Error:
                if _is_still(source, before):
                    raise
                return False
            return _is_still(source, before)
    return not to.exists()


def _is_still(folder: Path, before: os.stat_result) -> bool:
    try:
        return os.path.samestat(before, folder.stat())
    except FileNotFoundError:
        return False
