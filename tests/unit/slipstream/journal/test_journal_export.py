"""`slipstream journal export`: whole files, or none."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from protocol.errors import ExitCode
from protocol.wire.codec import encode
from replay.journal.reader import JournalReader
from replay.journal.writer import Journal
from slipstream.journal import export as journal_export
from tests.unit.replay.builders import group_message
from tests.unit.replay.journal.test_journal_reader import entry
from tests.unit.slipstream.journal.command import Command, damage


def test_export_as_json_lines(journal: Journal, command: Command, tmp_path: Path) -> None:
    rewards = np.array([np.nan, 1.0], "<f4").tobytes()
    logprobs = np.array([-0.5, -0.25, math.nan, -0.125], "<f4").tobytes()
    versions = np.array([0, 0, 2, 1], "<i4").tobytes()
    credit, ends = np.array([0, 0.5, 0, 0], "<f4").tobytes(), bytes([0, 1, 0, 1])
    given = {"rewards": rewards, "logprobs": logprobs, "token_versions": versions, "credit": credit, "span_ends": ends}
    given["teacher_logprobs"] = np.array([-1, -2, -3, -4], "<f4").tobytes()
    given["teacher_top_ids"] = np.array([3, 7, 7, 8, 7, 8, -1, -1], "<i4").tobytes()
    given["teacher_top_logprobs"] = np.array([-1, -1, -1, -2, -1, -2, 0, 0], "<f4").tobytes()
    frame = encode(group_message("0-11-0-1-s", **given))
    journal.append([entry(11, frame=frame)])
    to = tmp_path / "groups.jsonl"
    assert command("export", "--to", str(to), "--state", "ready") == f"2 groups in {to}\n"
    first, record = map(json.loads, to.read_text().splitlines())
    assert first["lease_id"] == "0-10-0-1-s"
    assert {name: record[name] for name in list(record)[-14:]} == {
        "prompt_ids": [1, 2],
        "completion_ids": [[3, 4, 5], [6]],
        "logprobs": [[-0.5, -0.25, None], [-0.125]],
        "token_versions": [[0, 0, 2], [1]],
        "truncated": [False, True],
        "sampled": [[True, True, True], [True]],
        "episodes": [0, 1],
        "reward_names": ["correct"],
        "rewards": [[None], [1.0]],
        "credit": [[0.0, 0.5, 0.0], [0.0]],
        "span_ends": [[False, True, False], [True]],
        "teacher_logprobs": [[-1.0, -2.0, -3.0], [-4.0]],
        "teacher_top_ids": [[[3, 7], [7, 8], [7, 8]], [[-1, -1]]],
        "teacher_top_logprobs": [[[-1.0, -1.0], [-1.0, -2.0], [-1.0, -2.0]], [[0.0, 0.0]]],
    }
    assert [first[name] for name in list(record)[-5:]] == [None] * 5
    assert (record["lease_id"], record["state"], record["step"], record["reward"]) == ("0-11-0-1-s", "ready", None, 0.5)
    command("export", "--to", f"{tmp_path}/no/x.jsonl", code=ExitCode.JOURNAL)
    assert command.err.endswith("no/x.jsonl: cannot be written: No such file or directory; choose another place\n")


def test_export_as_parquet_in_row_groups(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_export, "_ROW_GROUP_ROWS", 4)
    to = tmp_path / "groups.parquet"
    command("export", "--to", str(to))
    file = pq.ParquetFile(to)
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [4, 4, 3]
    table = file.read().to_pylist()
    assert [row["prompt_id"] for row in table] == list(range(11))
    assert table[4]["completion_ids"] == [[3, 4, 5], [6]]
    assert table[4]["logprobs"] == [[float(np.float32(-v)) for v in (0.1, 0.2, 0.3)], [float(np.float32(-0.4))]]
    assert table[4]["token_versions"] == [[1, 1, 1], [1]]
    assert (table[4]["sampled"], table[4]["episodes"]) == ([[True, True, True], [True]], [0, 1])
    assert (table[4]["rewards"], table[4]["reward"], table[4]["step"]) == ([[0.0], [1.0]], -0.25, 2)
    assert (table[5]["reward"], table[5]["step"]) == (None, None)
    assert [table[4][name] for name in ("reroll", "verdict", "num_scored", "num_successes", "num_replays")] == [
        0, "mixed", 2, 1, 0,
    ]  # fmt: skip
    kinds = {name: str(file.schema_arrow.field(name).type) for name in ("step", "reward", "state", "episodes")}
    assert kinds == {"step": "int64", "reward": "double", "state": "string", "episodes": "list<element: int32>"}
    command("export", "--to", str(tmp_path / "two.jsonl"), "--limit", "2")
    two = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert [row["prompt_id"] for row in two] == [9, 10]
    assert [list(row) for row in two] == [list(table[0])] * 2, "the same columns in both formats"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_export_that_fails_leaves_what_was_there(
    journal: Journal, command: Command, tmp_path: Path, suffix: str
) -> None:
    to = tmp_path / f"groups{suffix}"
    to.write_text("the last one")
    damage(journal.path, "DELETE FROM bodies WHERE seq = 11")
    command("export", "--to", str(to), code=ExitCode.JOURNAL)
    expected = f"slipstream journal: error: {journal.path}: group 0-10-0-1-s has no body; restore a copy of run_dir\n"
    assert command.err == expected
    assert to.read_text() == "the last one"
    assert sorted(file.name for file in tmp_path.iterdir()) == [to.name, "run"]


def test_export_passes_over_what_retention_deletes_meanwhile(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = JournalReader.rows

    def rows_of_the_past(reader: JournalReader, *arguments: Any, **options: Any) -> Any:
        found = list(rows(reader, *arguments, **options))
        with journal.transaction() as db:
            for table in ("bodies", "groups"):
                db.execute(f"DELETE FROM {table} WHERE seq <= 2")
        return found

    monkeypatch.setattr(JournalReader, "rows", rows_of_the_past)
    to = tmp_path / "groups.jsonl"
    assert command("export", "--to", str(to)) == f"9 groups in {to}\n"


@pytest.mark.parametrize("name", ["rollouts.jsonl", "steps.1.jsonl", "producer-0.jsonl"])
def test_files_that_the_run_writes_are_not_replaced(
    name: str, journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command.run_dir / name).write_text("{}\n")
    monkeypatch.chdir(command.run_dir)
    command("export", "--to", name, code=ExitCode.JOURNAL)
    assert (
        command.err
        == f"slipstream journal: error: --to {name}: the run itself writes a file of this name; choose another name\n"
    )
    assert (command.run_dir / name).read_text() == "{}\n"
    command("export", "--to", "groups.jsonl")
    command("export", "--to", str(tmp_path / name))
