"""`rl-journal`: what every command says about journals whose content is known, and about damaged ones."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from consumer import journal_export
from consumer.journal_cli import main
from consumer.journal_text import printable, size
from protocol.codec import encode
from protocol.errors import ExitCode
from protocol.messages import Heartbeat
from replay.journal import DeadLetter, Journal
from replay.journal_reader import JournalReader
from tests.unit.protocol.test_config import MINIMAL
from tests.unit.replay.builders import group_message
from tests.unit.replay.test_journal_reader import contents, damage, entry, ids, write_run

REPOSITORY = Path(__file__).parents[3]
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "run" / "journal.sqlite")) as result:
        write_run(result)
        yield result


class Command:
    """Runs `rl-journal --run RUN_DIR ...` in this process."""

    def __init__(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run_dir = run_dir
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = ExitCode.OK) -> str:
        try:
            ended = main(["--run", str(self.run_dir), *arguments])
        except SystemExit as end:
            ended = int(end.code or 0)
        out, self.err = self._capsys.readouterr()
        assert ended == code, self.err
        return out

    def lines(self, *arguments: str, code: int = ExitCode.OK) -> list[str]:
        return self(*arguments, code=code).splitlines()

    def json(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self.lines(*arguments, "--json")]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "run", capsys)


# stats


def test_stats_for_programs(journal: Journal, command: Command) -> None:
    journal.bury(DeadLetter(0, 20, 3, "data", "reward_failed", ""))
    journal.bury(DeadLetter(0, 21, 3, "data", "reward_failed", ""))
    journal.bury(DeadLetter(0, 22, 3, "infra", "expired", ""))
    journal.quarantine_frames([("checksum mismatch", b"SL")])
    journal.note_facts({"run_id": "abc"})
    (found,) = command.json("stats")
    oldest, newest = found.pop("arrived")
    assert time.time() - 60 < oldest <= newest <= time.time()
    assert found.pop("file_bytes") == sum(map(len, contents(journal.path).values()))
    assert found == {
        "run_id": "abc",
        "groups": 11,
        "groups_deleted": 0,
        "groups_by_outcome": {
            "accepted": {"claimed": 2, "dropped": 1, "ready": 1, "stale": 1, "trained": 4},
            "no_signal": {"no_signal": 1},
            "stale": {"stale": 1},
        },
        "group_bytes": sum(len(entry(number).frame) for number in range(11)),
        "tokens": 44,
        "steps": [1, 3],
        "policies": [0, 2],
        "dead_letters": {"reward_failed": 2, "expired": 1},
        "frames_quarantined": 1,
    }


def test_stats_for_people(journal: Journal, command: Command) -> None:
    journal.drop(ids([10]), "quarantined")
    journal.bury(DeadLetter(0, 20, 3, "data", "reward_failed", ""))
    lines = command.lines("stats")
    assert re.fullmatch(rf"journal       {journal.path}, \d+\.\d KiB, run unknown", lines[0])
    assert re.fullmatch(r"groups        11 with 44 tokens in \d\.\d KiB; 0 older ones deleted", lines[1])
    assert re.fullmatch(rf"arrived       {TIME} to {TIME}", lines[2])
    assert lines[3:] == [
        "steps         1-3",
        "policies      0-2",
        "dead letters  1: reward_failed 1",
        "quarantine    1 groups, 0 frames",
        "",
        "outcome    state        groups",
        "accepted   claimed           2  in a step that has not ended",
        "accepted   dropped           1  do not fit the configuration any more",
        "accepted   quarantined       1  the trainer died too often in their step",
        "accepted   stale             1",
        "accepted   trained           4",
        "no_signal  no_signal         1",
        "stale      stale             1",
    ]


# list


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (["--limit", "3"], [8, 9, 10]),
        (["--limit", "0"], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (["--version", "1"], [4, 6, 7]),
        (["--version", "1:2", "--limit", "2"], [9, 10]),
        (["--step", "2:3"], [3, 4, 6, 7]),
        (["--state", "trained"], [0, 2, 3, 4]),
        (["--reward=-1:0"], [4]),
        (["--reward", "0.75:1"], [1]),
        (["--prompt", "3"], [3]),
        (["--state", "ready", "--version", "0"], []),
    ],
)
def test_list_filters(journal: Journal, command: Command, flags: list[str], expected: list[int]) -> None:
    assert [row["prompt_id"] for row in command.json("list", *flags)] == expected


def test_list_for_people(journal: Journal, command: Command) -> None:
    lines = command.lines("list", "--limit", "8")
    assert lines[0] == "group     state    step  version  reward  tokens  prompt  producer  arrived"
    assert [re.sub(rf" +{TIME}$", "", line) for line in lines[1:]] == [
        "0-3-1-s   trained     2        0   0.500       4       3  q",
        "0-4-1-s   trained     2        1  -0.250       4       4  p",
        "0-5-1-s   stale       -        0       -       4       5  p",
        "0-6-1-s   claimed     3        1   0.500       4       6  p",
        "0-7-1-s   claimed     3        1   0.500       4       7  p",
        "0-8-1-s   stale       -        2   0.500       4       8  p",
        "0-9-1-s   dropped     -        2   0.500       4       9  p",
        "0-10-1-s  ready       -        2   0.500       4      10  p",
    ]


def test_list_shows_fifty_groups_unless_told(journal: Journal, command: Command) -> None:
    journal.append(entry(number) for number in range(11, 100))
    assert [row["prompt_id"] for row in command.json("list")] == list(range(50, 100))
    assert len(command.lines("list", "--limit", "0")) == 101


def test_a_producer_cannot_write_to_the_terminal(journal: Journal, command: Command) -> None:
    journal.append([entry(11, producer="\x1b[2J\nforged line")])
    (_, line) = command.lines("list", "--limit", "1")
    assert "  \\x1b[2J\\nforged line  " in line
    assert printable("tab\there\u202e", keep="\t") == "tab\there\\u202e"


# show


def test_show_with_token_ids(journal: Journal, command: Command) -> None:
    message = group_message(
        "0-11-0-1-s",
        2,
        logprobs=np.array([-0.1, -0.2, np.nan, -0.4], "<f4").tobytes(),
        rewards=np.array([0.0, np.nan, 1.0, 0.5], "<f4").tobytes(),
        generation_s=1.5,
    )
    journal.note_facts({"reward_names": '["correct", "format"]'})
    journal.append([entry(11, 2, frame=encode(message))])
    lines = command.lines("show", "0-11-0-1-s")
    assert re.fullmatch(rf"arrived   {TIME}", lines.pop(6))
    assert lines == [
        "group     0-11-1-s",
        "state     ready",
        "outcome   accepted",
        "prompt    11 in epoch 0, lease 1",
        "policy    version 2",
        "producer  p, 1.50 s to generate, 0.00 s to score",
        f"size      2 completions, 4 tokens, {len(encode(message))} bytes",
        "reward    0.500",
        "token ids instead of text: the journal does not say which model it is of",
        "",
        "prompt, 2 tokens",
        "  1 2",
        "",
        "completion 1 of 2, 3 tokens",
        "rewards: correct 0.000, format -",
        "log-probs: mean -0.150, lowest -0.200, sum -0.300, 1 tokens without one",
        "  3 4 5",
        "",
        "completion 2 of 2, 1 tokens, cut off at the limit",
        "rewards: correct 1.000, format 0.500",
        "log-probs: mean -0.400, lowest -0.400, sum -0.400",
        "  6",
    ]


def test_show_every_token(journal: Journal, command: Command) -> None:
    lines = command.lines("show", "0-7-0-1-s", "--tokens")
    assert lines[1] == "state     claimed, step 3, position 0, try 1 of 2"
    start = lines.index("  3 4 5") + 1
    assert lines[start : start + 4] == [
        "token  id  log-prob  text",
        "    0   3    -0.100",
        "    1   4    -0.200",
        "    2   5    -0.300",
    ]


class Letters:
    """A tokenizer: 1 is A, 2 is B, ...; 6 wants to clear the screen."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("\x1b[2J" if token == 6 else chr(64 + token) for token in tokens)


def test_show_with_text(journal: Journal, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer.journal_show.load_tokenizer", lambda facts: Letters())
    lines = command.lines("show", "0-7-0-1-s", "--tokens")
    assert not any(line.startswith("token ids") for line in lines)
    assert lines[lines.index("prompt, 2 tokens") + 1] == "  AB"
    assert "  CDE" in lines
    assert "    2   5    -0.300  'E'" in lines
    assert "  \\x1b[2J" in lines


def test_show_with_the_tokenizer_of_the_run(
    journal: Journal, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate("_abcdefghi")}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(str(folder))
    journal.note_facts({"model_path": str(folder)})
    lines = command.lines("show", "0-7-0-1-s")
    assert lines[lines.index("prompt, 2 tokens") + 1] == "  a b"
    assert "  c d e" in lines
    journal.note_facts({"tokenizer_digest": "0" * 64})
    assert (
        f"token ids instead of text: the tokenizer in {folder} is not the one of the run"
        in command.lines("show", "0-7-0-1-s")
    )  # fmt: skip
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    journal.note_facts({"model_path": str(tmp_path / "gone")})
    (line,) = [line for line in command.lines("show", "0-7-0-1-s") if line.startswith("token ids")]
    assert line.startswith(f"token ids instead of text: the tokenizer of {tmp_path}/gone cannot be loaded: ")


# export


def test_export_as_json_lines(journal: Journal, command: Command, tmp_path: Path) -> None:
    rewards = np.array([np.nan, 1.0], "<f4").tobytes()
    logprobs = np.array([-0.5, -0.25, math.nan, -0.125], "<f4").tobytes()
    journal.append([entry(11, frame=encode(group_message("0-11-0-1-s", rewards=rewards, logprobs=logprobs)))])
    to = tmp_path / "groups.jsonl"
    assert command("export", "--to", str(to), "--state", "ready") == f"2 groups in {to}\n"
    first, record = map(json.loads, to.read_text().splitlines())
    assert first["group_id"] == "0-10-0-1-s"
    assert {name: record[name] for name in list(record)[-6:]} == {
        "prompt_ids": [1, 2],
        "completion_ids": [[3, 4, 5], [6]],
        "logprobs": [[-0.5, -0.25, None], [-0.125]],
        "truncated": [False, True],
        "reward_names": ["correct"],
        "rewards": [[None], [1.0]],
    }
    assert (record["group_id"], record["state"], record["step"], record["reward"]) == ("0-11-0-1-s", "ready", None, 0.5)


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
    assert (table[4]["rewards"], table[4]["reward"], table[4]["step"]) == ([[0.0], [1.0]], -0.25, 2)
    assert (table[5]["reward"], table[5]["step"]) == (None, None)
    command("export", "--to", str(tmp_path / "two.parquet"), "--limit", "2")
    assert pq.read_table(tmp_path / "two.parquet")["prompt_id"].to_pylist() == [9, 10]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_export_that_fails_leaves_what_was_there(
    journal: Journal, command: Command, tmp_path: Path, suffix: str
) -> None:
    to = tmp_path / f"groups{suffix}"
    to.write_text("the last one")
    damage(journal.path, "DELETE FROM bodies WHERE seq = 11")
    command("export", "--to", str(to), code=ExitCode.JOURNAL)
    expected = f"rl-journal: error: {journal.path}: group 0-10-1-s has no body; restore a copy of run_dir\n"
    assert command.err == expected
    assert to.read_text() == "the last one"
    assert sorted(file.name for file in tmp_path.iterdir()) == [to.name, "run"]


def test_export_to_a_place_that_is_not_there(journal: Journal, command: Command, tmp_path: Path) -> None:
    command("export", "--to", f"{tmp_path}/no/x.jsonl", code=ExitCode.JOURNAL)
    assert command.err == (
        f"rl-journal: error: --to {tmp_path}/no/x.jsonl: cannot be written: No such file or directory; "
        "choose another place\n"
    )


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


# verify


def test_verify_finds_nothing_wrong(journal: Journal, command: Command) -> None:
    bytes_read = size(sum(len(entry(number).frame) for number in range(11)))
    assert command("verify") == f"read 11 groups, {bytes_read}\n0 problems\n"
    assert command.err == "", "no progress bar where there is no terminal"


def other_frame(path: Path, seq: int, frame: bytes, crc: int) -> None:
    """Replaces a body with one whose checksum fits."""
    damage(path, "UPDATE bodies SET frame = ? WHERE seq = ?", (frame, seq))
    damage(path, "UPDATE groups SET crc = ? WHERE seq = ?", (crc, seq))


def test_verify_says_what_is_wrong_and_where(journal: Journal, command: Command) -> None:
    path = journal.path
    damage(path, "UPDATE bodies SET frame = ? WHERE seq = 1", (entry(0).frame[:-1] + b"?",))
    damage(path, "DELETE FROM bodies WHERE seq = 2")
    damage(path, "INSERT INTO bodies VALUES(99, 'x')")
    heartbeat = encode(Heartbeat(0, 1, [], 0, 0.0))
    other_frame(path, 3, heartbeat, entry(2, frame=heartbeat).crc())
    short = encode(group_message("0-3-0-1-s", logprobs=b"\0" * 8))
    other_frame(path, 4, short, entry(3, frame=short).crc())
    stranger = encode(group_message("0-0-0-1-s", 1))
    other_frame(path, 5, stranger, entry(4, 1, frame=stranger).crc())
    other_frame(path, 6, b"SL??", entry(5, outcome="stale", frame=b"SL??").crc())
    damage(path, "UPDATE groups SET num_tokens = 5 WHERE seq = 7")
    mend = "restore a copy of run_dir, or use the release that wrote it"
    size_of = len(entry(6, 1).frame)
    lines = command.lines("verify", code=ExitCode.JOURNAL)
    assert lines[0] == "body 99 belongs to no group"
    assert lines[1].startswith("read 11 groups, ")
    assert lines[2:] == [
        "group 0-0-1-s is damaged (checksum); restore a copy of run_dir",
        "group 0-1-1-s has no body; restore a copy of run_dir",
        f"group 0-2-1-s cannot be read: the body is a Heartbeat; {mend}",
        f"group 0-3-1-s cannot be read: logprobs has 8 bytes, expected 4 x 4; {mend}",
        f"group 0-4-1-s cannot be read: the body is of group 0-0-1-s, policy version 1; {mend}",
        f"group 0-5-1-s cannot be read: frame of 4 bytes is shorter than the 8-byte prefix; {mend}",
        "group 0-6-1-s cannot be read: the body has 4 tokens and "
        f"{size_of} bytes, the row says 5 and {size_of}; {mend}",
        "8 problems",
    ]


def steps(path: Path, *batches: tuple[int, int, list[int]]) -> None:
    """Writes claims as they stand: step, last step, positions."""
    with closing(Journal(path)) as journal:
        number = 0
        for step, last_step, positions in batches:
            journal.append(entry(number + place) for place in range(len(positions)))
            for place, position in enumerate(positions):
                journal.query(
                    "UPDATE groups SET step = ?, last_step = ?, position = ? WHERE group_id = ?",
                    (step, last_step, position, f"0-{number + place}-0-1-s"),
                )
            number += len(positions)


@pytest.mark.parametrize(
    ("batches", "facts", "problems"),
    [
        ([(1, 1, [0, 1]), (2, 2, [0, 1])], {"groups_per_step": "2"}, []),
        ([(7, 7, [0, 1]), (8, 8, [0, 1])], {"groups_per_step": "2"}, []),
        ([(1, 1, [0, 1]), (3, 3, [0, 1])], {"groups_per_step": "2"}, ["step 2: no groups"]),
        ([(1, 2, [0]), (7, 8, [0])], {"groups_per_step": "1"}, ["steps 3 to 6: no groups"]),
        ([(1, 3, [0]), (3, 4, [0])], {"groups_per_step": "1"}, ["step 3: recorded twice"]),
        ([(1, 1, [0, 1]), (2, 2, [0]), (3, 3, [0, 1])], {"groups_per_step": "2"}, ["step 2: 1 groups, expected 2"]),
        ([(1, 1, [0, 1]), (2, 2, [0]), (3, 3, [0, 1])], {}, ["step 2: 1 groups, expected 2"]),
        ([(1, 1, [0, 2])], {"groups_per_step": "2"}, ["step 1: positions 0, 2, expected 0 to 1"]),
        ([(1, 1, [0, 1]), (2, 2, [0, 0])], {}, ["step 2: positions 0, 0, expected 0 to 1"]),
        ([(1, 1, [0, 1, 2]), (2, 2, [0, 1, 2]), (3, 3, [0])], {"groups_per_step": "1"}, []),
        ([(1, 1, [0])], {}, []),
        ([], {}, []),
    ],
)
def test_verify_follows_the_steps(
    command: Command, batches: list[tuple[int, int, list[int]]], facts: dict[str, str], problems: list[str]
) -> None:
    path = command.run_dir / "journal.sqlite"
    steps(path, *batches)
    with closing(Journal(path)) as journal:
        journal.note_facts(facts)
    found = command.lines("verify", code=ExitCode.JOURNAL if problems else ExitCode.OK)
    assert found[1:-1] == problems
    assert found[-1] == f"{len(problems)} problem{'s' * (len(problems) != 1)}"


def test_retention_may_have_cut_the_first_step_kept(journal: Journal, command: Command) -> None:
    with journal.transaction() as db:
        for table in ("bodies", "groups"):
            db.execute(f"DELETE FROM {table} WHERE seq <= 1")
    assert [row["prompt_id"] for row in command.json("list", "--step", "1")] == [2]
    assert command.lines("verify")[-1] == "0 problems"
    damage(journal.path, "UPDATE groups SET step = NULL, last_step = NULL WHERE seq = 4")
    assert command.lines("verify", code=ExitCode.JOURNAL)[1:] == [
        "step 2: 1 groups, expected 2",
        "step 2: positions 1, expected 0 to 0",
        "2 problems",
    ]


def test_verify_looks_again_at_steps_that_retention_deletes_meanwhile(
    journal: Journal, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = JournalReader.row

    def row_after_a_deletion(reader: JournalReader, group_id: str) -> Any:
        if group_id == "0-4-0-1-s":  # the last of step 2: delete steps 1 and 2
            with journal.transaction() as db:
                for table in ("bodies", "groups"):
                    db.execute(f"DELETE FROM {table} WHERE seq <= 5")
        return row(reader, group_id)

    monkeypatch.setattr(JournalReader, "row", row_after_a_deletion)
    lines = command.lines("verify")
    assert lines[0].startswith("read 11 groups, ")
    assert lines[1:] == ["0 problems"]


def test_verify_goes_on_after_a_table_that_cannot_be_read(command: Command) -> None:
    path = command.run_dir / "journal.sqlite"
    with closing(Journal(path)) as journal:
        journal.append(entry(number) for number in range(500))
    content = bytearray(path.read_bytes())
    content[8 * 4096 :] = b"\xff" * (len(content) - 8 * 4096)
    path.write_bytes(content)
    lines = command.lines("verify", code=ExitCode.JOURNAL)
    assert len(lines) > 3
    assert any(
        re.fullmatch(r"is damaged \(.*\); restore a copy of run_dir", line.split("sqlite ")[-1]) for line in lines
    )
    assert re.fullmatch(r"\d+ problems", lines[-1])


# quarantine and lineage


def test_quarantine(journal: Journal, command: Command) -> None:
    assert command.lines("quarantine") == [
        "groups in whose step the trainer died too often: none", "",
        "frames that were refused: none", "",
        "prompts that were given up (dead letters): none", "",
    ]  # fmt: skip
    journal.drop(ids([6, 7]), "quarantined")
    journal.quarantine_frames([("checksum mismatch", b"SL\x01\x00" + b"x" * 2044)])
    journal.bury(DeadLetter(2, 12, 3, "data", "reward_failed", "correct: it\nraised"))
    lines = command.lines("quarantine")
    assert [re.sub(rf" +{TIME}$|^{TIME}  ", "", line) for line in lines] == [
        "groups in whose step the trainer died too often:",
        "group    died in step  prompt  version  producer  arrived",
        "0-6-1-s  3                  6        1  p",
        "0-7-1-s  3                  7        1  p",
        "",
        "frames that were refused:",
        "received                size  first bytes                       reason",
        "2.0 KiB  534c0100787878787878787878787878  checksum mismatch",
        "",
        "prompts that were given up (dead letters):",
        "when                 epoch  prompt  attempts  class  reason         detail",
        "    2      12         3  data   reward_failed  correct: it\\nraised",
        "",
    ]
    found = command.json("quarantine")
    assert [line["kind"] for line in found] == ["group", "group", "frame", "dead_letter"]
    assert (found[0]["group_id"], found[0]["step"], found[0]["dropped"]) == ("0-6-0-1-s", 3, "quarantined")
    assert (found[2]["num_bytes"], found[2]["head"]) == (2048, "534c0100" + "78" * 60)
    assert (found[3]["epoch"], found[3]["detail"]) == (2, "correct: it\nraised")


def test_lineage(journal: Journal, command: Command) -> None:
    lines = command.lines("lineage", "2")
    assert lines[:-1] == [
        "step 2 trains 2 groups",
        "",
        "position  group    prompt  version  staleness  reward  tokens  producer",
        "       0  0-3-1-s       3        0          1   0.500       4  q",
        "       1  0-4-1-s       4        1          0  -0.250       4  p",
        "",
    ]
    assert re.fullmatch(rf"policy: version 2, sha256 d2, published {TIME}", lines[-1])
    lines = command.lines("lineage", "3")
    assert (lines[0], lines[-1]) == ("step 3 trains 2 groups; it has not ended", "policy: none")
    assert [line.split()[:2] for line in lines[3:5]] == [["0", "0-7-0-1-s"], ["1", "0-6-0-1-s"]]
    command("lineage", "4", code=ExitCode.JOURNAL)
    assert command.err == (
        f"rl-journal: error: {journal.path} holds no groups of step 4; `rl-journal stats` says which steps it holds\n"
    )


def test_the_lineage_of_a_step_among_several_iterations(command: Command) -> None:
    with closing(Journal(command.run_dir / "journal.sqlite")) as journal:
        journal.append([entry(0)])
        journal.claim(1, 3, ids([0]))
        journal.end_step(1, (1, "d1"))
    lines = command.lines("lineage", "2")
    assert lines[0] == "step 2 trains 1 groups, as all of steps 1 to 3; it has not ended"
    assert lines[3].split() == ["0", "0-0-0-1-s", "0", "0", "-", "0.500", "4", "p"]  # no policy is known of before


# The command itself

EVERYTHING = [
    ["stats"],
    ["stats", "--json"],
    ["list", "--limit", "0"],
    ["list", "--json"],
    ["show", "0-0-0-1-s", "--tokens"],
    ["verify"],
    ["quarantine"],
    ["lineage", "1"],
]


@pytest.mark.parametrize("live", [True, False], ids=["live", "killed"])
def test_no_command_changes_the_journal(
    journal: Journal, capsys: pytest.CaptureFixture[str], tmp_path: Path, live: bool
) -> None:
    path = journal.path
    if not live:
        path = tmp_path / "killed" / "journal.sqlite"
        path.parent.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{journal.path}{suffix}", f"{path}{suffix}")
    before = contents(path)
    assert before["journal.sqlite-wal"]
    command = Command(path, capsys)
    for arguments in [*EVERYTHING, ["export", "--to", str(tmp_path / "x.jsonl")]]:
        assert command(*arguments)
        assert contents(path) == before


def test_every_command_on_an_empty_journal(command: Command, tmp_path: Path) -> None:
    Journal(command.run_dir / "journal.sqlite").close()
    assert command.lines("stats")[2:] == [
        "arrived       -",
        "steps         -",
        "policies      -",
        "dead letters  0",
        "quarantine    0 groups, 0 frames",
    ]
    assert command.json("stats")[0]["steps"] == []
    assert command("list") == "group  state  step  version  reward  tokens  prompt  producer  arrived\n"
    assert command.json("list") == command.json("quarantine") == []
    assert command("verify") == "read 0 groups, 0 B\n0 problems\n"
    for to in ("x.jsonl", "x.parquet"):
        assert command("export", "--to", str(tmp_path / to)) == f"0 groups in {tmp_path / to}\n"
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 0
    command("lineage", "1", code=ExitCode.JOURNAL)
    command("show", "0-0-0-1-s", code=ExitCode.JOURNAL)
    assert command.err == (
        f"rl-journal: error: {command.run_dir}/journal.sqlite holds no group 0-0-1-s; "
        "`rl-journal list` shows what it holds\n"
    )


def test_where_the_journal_is(
    journal: Journal, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(re.sub(r"(?m)^run_dir: .*$", f"run_dir: {tmp_path}/run", MINIMAL))
    monkeypatch.chdir(tmp_path / "run")
    for place in (["--run", str(journal.path)], ["--config", f"{tmp_path}/run.yaml"], []):
        assert main([*place, "list", "--limit", "1"]) == ExitCode.OK
        assert "0-10-0-1-s" in capsys.readouterr().out
    assert main(["--config", "absent.yaml", "stats"]) == ExitCode.CONFIG
    assert capsys.readouterr().err.startswith("rl-journal: error: absent.yaml: no such file. ")
    assert main(["--run", "absent", "stats"]) == ExitCode.JOURNAL
    assert capsys.readouterr().err == (
        "rl-journal: error: absent/journal.sqlite: no such file; "
        "a journal is RUN_DIR/journal.sqlite, written by rl-trainer\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND; see rl-journal --help"),
        (["list", "--step", "3:1"], "argument --step: 3:1 is empty, the larger number comes last; see rl-journal list"),
        (["list", "--step", "x"], "argument --step: expected a whole number (got 'x'); see rl-journal list"),
        (["list", "--reward", "1"], "argument --reward: expected two numbers such as 0.5:1 (got '1'); see rl-journal"),
        (["list", "--reward", "nan:1"], "argument --reward: nan:1 is empty, the larger number comes last; see"),
        (["list", "--limit", "-1"], "argument --limit: expected a whole number (got '-1'); see rl-journal list"),
        (["export", "--to", "x.csv"], "argument --to: expected a name that ends in .jsonl or .parquet (got 'x.csv'); "),
        (["list", "--state", "gone"], "argument --state: invalid choice: 'gone' (choose from "),
    ],
)
def test_usage_errors_are_one_line(command: Command, arguments: list[str], message: str) -> None:
    assert command(*arguments, code=ExitCode.USAGE) == ""
    assert command.err.startswith(f"rl-journal: error: {message}")
    assert command.err.count("\n") == 1


def test_a_bug_ends_with_its_traceback_and_code(
    journal: Journal, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer.journal_stats.collect", lambda reader: {}["a bug"])
    command("stats", code=ExitCode.BUG)
    assert command.err.startswith("Traceback (most recent call last)")
    assert command.err.endswith("rl-journal: this is a bug; please report it with the traceback above\n")


@pytest.mark.parametrize("arguments", [["--help"], ["list", "--help"], ["RUN", "list"], ["RUN", "stats"]], ids=" ".join)
def test_looking_at_rows_imports_nothing_heavy(journal: Journal, arguments: list[str]) -> None:
    program = (
        "import sys\nfrom consumer.journal_cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = ('torch', 'transformers', 'pyarrow', 'numpy', 'datasets', 'trl', 'vllm')\n"
        "print([name for name in heavy if name in sys.modules], code or 0, file=sys.stderr)"
    )
    given = ["--run", str(journal.path), *arguments[1:]] if arguments[0] == "RUN" else arguments
    shown = subprocess.run(
        [sys.executable, "-c", program, *given], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert shown.stderr == "[] 0\n"


def test_output_that_nobody_reads_to_its_end(journal: Journal) -> None:
    journal.append(entry(number, frame=b"x") for number in range(11, 5000))
    command = f"{sys.executable} -m consumer.journal_cli --run {journal.path} list --limit 0"
    shown = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (shown.returncode, shown.stderr) == (ExitCode.OK, "")
    assert shown.stdout.split()[0] == "group"


def test_twenty_thousand_groups_are_listed_in_bounded_memory(journal: Journal) -> None:
    journal.append(entry(number, frame=b"x" * 100) for number in range(11, 20_000))
    program = (
        "import sys, tracemalloc\nfrom consumer.journal_cli import main\n"
        "import consumer.journal_views\n"
        "tracemalloc.start()\ncode = main(sys.argv[1:])\n"
        "print(code, tracemalloc.get_traced_memory()[1], file=sys.stderr)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, "--run", str(journal.path), "list", "--limit", "0"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    code, peak = map(int, shown.stderr.split())
    assert code == ExitCode.OK
    assert peak < 4 * 2**20
    assert len(shown.stdout.splitlines()) == 20_001
