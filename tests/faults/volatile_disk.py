"""A disk whose cache is lost when the power goes, as an SQLite VFS.

Guarantee: while it is entered, every database that this process opens is written through it. Files look as usual to SQLite;
beside that, what each held at its last sync is kept, with the writes since. After so many operations the power fails:
every further one raises an I/O error and changes nothing. `survivors` writes down what that could leave: all that was
synced, and of every later write all of it, nothing, or a part in units of a sector.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import apsw

_SECTOR_BYTES = 512
_NAME = "volatile"


@dataclass
class _Content:
    """One file: what is on the disk, None if not even its name is there, and the changes since."""

    durable: bytearray | None = None
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)  # offset and data, or the size of a truncation

    def sync(self) -> None:
        self.durable = self.after(self.pending)
        self.pending = []

    def after(self, changes: list[tuple[int, bytes] | int]) -> bytearray:
        data = bytearray(self.durable or b"")
        for change in changes:
            size = change if isinstance(change, int) else change[0] + len(change[1])
            data.extend(bytes(max(0, size - len(data))))
            if isinstance(change, int):
                del data[change:]
            else:
                data[change[0] : size] = change[1]
        return data

    def survivors(self, rng: random.Random) -> list[tuple[int, bytes] | int]:
        """A disk is free to write late changes in any order, and to stop anywhere."""
        kept: list[tuple[int, bytes] | int] = []
        for change in self.pending:
            fate = rng.choice(("lost", "lost", "written", "torn"))
            if fate == "lost":
                continue
            if isinstance(change, int) or fate == "written":
                kept.append(change)
                continue
            offset, data = change
            starts = [start for start in range(0, len(data), _SECTOR_BYTES) if rng.random() < 0.5]
            kept += [(offset + start, data[start : start + _SECTOR_BYTES]) for start in starts]
        return kept


class _File(apsw.VFSFile):
    def __init__(
        self, beneath: str, filename: Any, flags: list[int], content: _Content, spend: Callable[[], None]
    ) -> None:
        super().__init__(beneath, filename, flags)
        self._content = content
        self._spend = spend

    def xWrite(self, data: bytes, offset: int) -> None:
        self._spend()
        super().xWrite(data, offset)
        self._content.pending.append((offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        self._spend()
        super().xTruncate(size)
        self._content.pending.append(size)

    def xSync(self, flags: int) -> None:
        self._spend()
        super().xSync(flags)
        self._content.sync()


class _Vfs(apsw.VFS):
    def __init__(self, beneath: str, contents: dict[str, _Content], spend: Callable[[], None]) -> None:
        super().__init__(_NAME, beneath, makedefault=True)
        self._beneath = beneath
        self._contents = contents
        self._spend = spend

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        return _File(self._beneath, name, flags, self._contents.setdefault(path, _Content()), self._spend)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self._spend()
        super().xDelete(filename, syncdir)
        self._contents.pop(filename, None)


class VolatileDisk:
    """See the module's guarantee.

    Args:
        operations: writes, truncations, syncs and deletions until the power fails.
    """

    def __init__(self, operations: int) -> None:
        self._operations = operations
        self._contents: dict[str, _Content] = {}
        self._default = apsw.vfs_names()[0]

    def __enter__(self) -> "VolatileDisk":
        self._vfs = _Vfs(self._default, self._contents, self._spend)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        apsw.set_default_vfs(self._default)
        self._vfs.unregister()

    def survivors(self, target: Path, rng: random.Random) -> None:
        """Writes to `target` what the power cut could leave."""
        target.mkdir()
        for path, content in self._contents.items():
            if content.durable is None and rng.random() < 0.5:
                continue
            (target / Path(path).name).write_bytes(content.after(content.survivors(rng)))

    def _spend(self) -> None:
        self._operations -= 1
        if self._operations < 0:
            raise apsw.IOError("the power is gone")
