"""Folders that demos and benchmarks make anew each time.

Guarantee: nothing is deleted that was not made here: a folder that is deleted has our mark, and no trainer works in it.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from protocol.channel.channel import ipc_lock
from protocol.errors import SlipstreamError

MARK = ".made_by_a_demo"
_STAMP = "built_by"


def fresh_folder(folder: Path) -> None:
    """Make an empty folder, in place of one that this function made before. Exit with an error in place of any other."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        sys.exit(f"{folder} is not a folder; name another one")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARK).is_file():
            sys.exit(
                f"{folder} has files that no demo made, and is not replaced; move them away, or name another folder"
            )
        try:
            with ipc_lock(f"ipc://{folder.absolute()}/control.ipc"):
                shutil.rmtree(folder)
        except SlipstreamError as error:
            sys.exit(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def build_once(folder: Path, recipe: bytes, build: Callable[[Path], object]) -> None:
    """Build `folder`, whole or not at all, unless it was built with the same recipe before."""
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_bytes() == recipe:
        return
    if folder.exists() and not stamp.is_file():
        sys.exit(f"{folder} was not built here, and is not replaced; move it away")
    print(f"building {folder}, once", flush=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    build(partial)
    (partial / _STAMP).write_bytes(recipe)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
