"""`slipstream journal list`, `quarantine` and `lineage`: the rows of a journal whose content is known."""

import re

import pytest

from protocol.errors import ExitCode
from replay.journal.schema import DeadLetter
from replay.journal.writer import Journal
from replay.rerolls import Grade
from slipstream.tables import printable
from tests.unit.replay.journal.test_journal_reader import claim, entry, ids
from tests.unit.slipstream.journal.command import TIME, Command, damage


def replay(journal: Journal, step: int, *numbers: int) -> None:
    claim(journal, step, step, again=numbers)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (["--limit", "3"], [8, 9, 10]),
        (["--version", "1:2", "--step", "2:3"], [4, 6, 7]),
        (["--reward=-1:0", "--state", "trained", "--prompt", "4"], [4]),
        (["--verdict", "failed", "--limit", "1"], [9]),
        (["--verdict", "failed", "--state", "trained"], [2]),
        (["--replays", "1:9"], [0, 3]),
        (["--replays", "0", "--limit", "2"], [9, 10]),
        (["--replays", "1:9", "--verdict", "mixed", "--limit", "0"], [0, 3]),
    ],
)
def test_list_filters(journal: Journal, command: Command, flags: list[str], expected: list[int]) -> None:
    damage(journal.path, "UPDATE groups SET verdict = 'failed' WHERE prompt_id IN (2, 9)")
    replay(journal, 4, 0, 3)
    replay(journal, 5, 0)
    assert [row["prompt_id"] for row in command.json("list", *flags)] == expected


def test_list_for_people(journal: Journal, command: Command) -> None:
    lines = command.lines("list", "--limit", "8")
    assert [re.sub(rf" +{TIME}$", "", line) for line in lines] == [
        "group       state    step  version  reward  verdict    tokens  prompt  reroll  replays  producer  arrived",
        "0-3-0-1-s   trained     2        0   0.500  mixed 1/2       4       3       0        0  q",
        "0-4-0-1-s   trained     2        1  -0.250  mixed 1/2       4       4       0        0  p",
        "0-5-0-1-s   stale       -        0       -  mixed 1/2       4       5       0        0  p",
        "0-6-0-1-s   claimed     3        1   0.500  mixed 1/2       4       6       0        0  p",
        "0-7-0-1-s   claimed     3        1   0.500  mixed 1/2       4       7       0        0  p",
        "0-8-0-1-s   stale       -        2   0.500  mixed 1/2       4       8       0        0  p",
        "0-9-0-1-s   dropped     -        2   0.500  mixed 1/2       4       9       0        0  p",
        "0-10-0-1-s  ready       -        2   0.500  mixed 1/2       4      10       0        0  p",
    ]


def test_list_shows_prompts_that_came_back_and_groups_that_were_replayed(journal: Journal, command: Command) -> None:
    back = entry(2, 2, reroll=1, grade=Grade("unscored", 0, 0))
    journal.append([back])
    claim(journal, 4, 4, 10, again=(2,))
    lines = command.lines("list", "--prompt", "2")
    assert [re.sub(rf" +{TIME}$", "", line) for line in lines[1:]] == [
        "0-2-0-1-s  trained     1        0   0.500  mixed 1/2       4       2       0        1  p",
        "0-2-1-1-s  ready       -        2   0.500  unscored        4       2       1        0  p",
    ]
    assert [row["reroll"] for row in command.json("list", "--prompt", "2")] == [0, 1]


def test_a_producer_cannot_write_to_the_terminal(journal: Journal, command: Command) -> None:
    journal.append([entry(11, producer="\x1b[2J\nforged line")])
    (_, line) = command.lines("list", "--limit", "1")
    assert "  \\x1b[2J\\nforged line  " in line
    assert printable("tab\there\u202e", keep="\t") == "tab\there\\u202e"


def test_quarantine(journal: Journal, command: Command) -> None:
    assert command.lines("quarantine") == [
        "groups in whose step the trainer died too often: none", "",
        "frames that were refused: none", "",
        "dead letters (prompts without more leases): none", "",
    ]  # fmt: skip
    journal.drop(ids([6, 7]), "quarantined")
    journal.quarantine_frames([("checksum mismatch", b"SL\x01\x00" + b"x" * 2044)])
    journal.add_dead_letter(DeadLetter(2, 12, 0, 3, "data", "reward_failed", "correct: it\nraised"))
    lines = command.lines("quarantine")
    assert [re.sub(rf" +{TIME}$|^{TIME}  ", "", line) for line in lines] == [
        "groups in whose step the trainer died too often:",
        "group      died in step  prompt  version  producer  arrived",
        "0-6-0-1-s  3                  6        1  p",
        "0-7-0-1-s  3                  7        1  p",
        "",
        "frames that were refused:",
        "received                size  first bytes                       reason",
        "2.0 KiB  534c0100787878787878787878787878  checksum mismatch",
        "",
        "dead letters (prompts without more leases):",
        "when                 epoch  prompt  reroll  attempts  class  reason         detail",
        "    2      12       0         3  data   reward_failed  correct: it\\nraised",
        "",
    ]
    found = command.json("quarantine")
    assert [line["kind"] for line in found] == ["group", "group", "frame", "dead_letter"]
    assert (found[0]["lease_id"], found[0]["step"], found[0]["dropped"]) == ("0-6-0-1-s", 3, "quarantined")
    assert (found[2]["num_bytes"], found[2]["head"]) == (2048, "534c0100" + "78" * 60)
    assert (found[3]["epoch"], found[3]["detail"]) == (2, "correct: it\nraised")


def test_lineage(journal: Journal, command: Command) -> None:
    lines = command.lines("lineage", "2")
    assert lines[:-1] == [
        "step 2 trains 2 groups",
        "",
        "position  use    group      prompt  version  staleness  reward  verdict    tokens  producer",
        "       0  first  0-3-0-1-s       3        0          1   0.500  mixed 1/2       4  q",
        "       1  first  0-4-0-1-s       4        1          0  -0.250  mixed 1/2       4  p",
        "",
    ]
    assert re.fullmatch(rf"policy: version 2, sha256 d2, published {TIME}", lines[-1])
    lines = command.lines("lineage", "3")
    assert (lines[0], lines[-1]) == ("step 3 trains 2 groups; it has not ended", "policy: none")
    assert [line.split()[:3] for line in lines[3:5]] == [["0", "first", "0-7-0-1-s"], ["1", "first", "0-6-0-1-s"]]
    command("lineage", "4", code=ExitCode.JOURNAL)
    assert f"{journal.path} holds no groups of step 4; `slipstream journal stats`" in command.err


def test_the_lineage_of_a_step_in_which_groups_replay(journal: Journal, command: Command) -> None:
    claim(journal, 4, 5, 10, again=(3, 2))
    lines = command.lines("lineage", "5")
    assert lines[0] == "step 5 trains 3 groups, 2 of them replayed, as all of steps 4 to 5; it has not ended"
    assert [line.split()[:6] for line in lines[3:6]] == [
        ["0", "first", "0-10-0-1-s", "10", "2", "0"],
        ["1", "replayed", "0-3-0-1-s", "3", "0", "2"],
        ["2", "replayed", "0-2-0-1-s", "2", "0", "2"],
    ]
