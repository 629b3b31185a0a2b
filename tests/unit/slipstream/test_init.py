"""`slipstream init`."""

import json
from pathlib import Path

from protocol.config.loader import load_config
from protocol.errors import ExitCode
from slipstream.cli import run


def test_the_files_of_a_first_run_pass_the_check_and_name_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "task"
    assert run(["init", str(folder)]) == ExitCode.OK
    config = load_config(str(folder / "run.yaml"))
    assert config.dataset.path == str(folder / "train.jsonl")
    schema = (folder / "run.yaml").read_text().splitlines()[0].rpartition("=")[2]
    assert json.loads(Path(schema).read_text())["type"] == "object"
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    names: dict = {}
    exec((folder / "rewards.py").read_text(), names)
    said = [[{"role": "assistant", "content": text}] for text in ("It is 3 + 4 = {}.", "{} or 5", "none")]
    for row in rows:
        completions = [[{**c[0], "content": c[0]["content"].format(row["answer"])}] for c in said]
        assert names["right"](completions, [row["answer"]] * 3, prompts=None) == [1.0, 0.0, 0.0]


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("mine = True\n")
    assert run(["init", str(tmp_path)]) == ExitCode.CONFIG
    assert [file.name for file in tmp_path.iterdir()] == ["rewards.py"]
    assert (tmp_path / "rewards.py").read_text() == "mine = True\n"


def test_a_place_that_cannot_be_written_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(["init", str(tmp_path / "file" / "below")]) == ExitCode.CONFIG
