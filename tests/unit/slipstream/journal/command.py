"""`slipstream journal`, run in this process, and journals that are damaged."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from protocol.errors import ExitCode
from slipstream.cli import run

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def damage(path: Path, sql: str, bindings: tuple[Any, ...] = ()) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.execute(sql, bindings)


class Command:
    """Runs `slipstream journal --run RUN_DIR ...` in this process."""

    def __init__(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run_dir = run_dir
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = ExitCode.OK) -> str:
        ended = run(["journal", "--run", str(self.run_dir), *arguments])
        out, self.err = self._capsys.readouterr()
        assert ended == code, self.err
        return out

    def lines(self, *arguments: str, code: int = ExitCode.OK) -> list[str]:
        return self(*arguments, code=code).splitlines()

    def json(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self.lines(*arguments, "--json")]
