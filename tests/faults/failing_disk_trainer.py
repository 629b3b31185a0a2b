"""`rl-trainer` whose disk refuses to sync, and forgets what it should have synced, while the file `FAILING_DISK` exists.

That is what Linux does when a disk fails: fsync says so once, and the pages that could not be written are not kept. Only
the databases of this process are concerned; everything else is real.
"""

import os
from pathlib import Path
from typing import Any

import apsw

from consumer.app import cli

_FAILS = Path(os.environ["FAILING_DISK"])


class _File(apsw.VFSFile):
    def __init__(self, beneath: str, filename: Any, flags: list[int]) -> None:
        super().__init__(beneath, filename, flags)
        self._undo: list[tuple[int, int, bytes]] = []  # size of the file, offset and content before each write

    def xWrite(self, data: bytes, offset: int) -> None:
        size = super().xFileSize()
        before = super().xRead(min(len(data), size - offset), offset) if offset < size else b""
        self._undo.append((size, offset, before))
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        if not _FAILS.exists():
            super().xSync(flags)
            self._undo.clear()
            return
        for size, offset, before in reversed(self._undo):
            if before:
                super().xWrite(before, offset)
            super().xTruncate(size)
        error: Any = apsw.IOError("disk I/O error")
        error.extendedresult = apsw.SQLITE_IOERR_FSYNC
        raise error


class _Vfs(apsw.VFS):
    def __init__(self) -> None:
        self._beneath = apsw.vfs_names()[0]
        super().__init__("failing", self._beneath, makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File(self._beneath, name, flags)


if __name__ == "__main__":
    vfs = _Vfs()
    cli.main()
