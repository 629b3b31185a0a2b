"""`slipstream journal show`: one group as people read it."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from protocol.wire.codec import encode
from protocol.wire.messages import MissingReward
from replay.journal.schema import RecordedBatch
from replay.journal.writer import Journal
from replay.rerolls import Grade
from tests.unit.replay.builders import group_message
from tests.unit.replay.journal.test_journal_reader import claim, entry
from tests.unit.slipstream.journal.command import TIME, Command


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
    assert re.fullmatch(rf"arrived   {TIME}", lines.pop(8))
    assert lines == [
        "group     0-11-0-1-s",
        "state     ready",
        "replayed  never",
        "outcome   accepted",
        "verdict   mixed, 1 successes of 2 scored",
        "prompt    11 in epoch 0, attempt 1, lease 1",
        "policy    version 2",
        "producer  p, 1.50 s to generate, 0.00 s to score",
        f"size      2 completions, 4 tokens, {len(encode(message))} bytes",
        "reward    0.500",
        "token ids instead of text: the journal does not name its model",
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


def test_show_says_why_a_reward_is_missing(journal: Journal, command: Command) -> None:
    rewards = np.array([np.nan, 1, np.nan, np.nan], "<f4").tobytes()
    missing = [MissingReward("correct", "timeout", "it is\nslow", (0,)), MissingReward("format", "raised", "no")]
    why = msgspec.msgpack.encode(missing)
    journal.note_facts({"reward_names": '["correct", "format"]'})
    journal.append([entry(11, frame=encode(group_message("0-11-0-1-s", rewards=rewards)), missing=why)])
    found = [line for line in command.lines("show", "0-11-0-1-s") if "is missing" in line]
    assert found == [r"correct is missing: timeout: it is\nslow", "format is missing: raised: no"]


def test_show_a_group_that_several_policies_sampled(journal: Journal, command: Command) -> None:
    versions = np.array([0, 0, 2, 1], "<i4").tobytes()
    spans = {"credit": np.array([0, 0.5, 0, 0], "<f4").tobytes(), "span_ends": bytes([0, 1, 1, 0])}
    spans["teacher_logprobs"] = np.array([-1, -2, 0, -4], "<f4").tobytes()
    spans["teacher_top_ids"] = np.array([7, -1, 7, 8, 5, -1, 7, -1], "<i4").tobytes()
    halves = np.log([0.5, 1, 0.5, 0.25, 1, 1, 0.75, 1])
    spans["teacher_top_logprobs"] = halves.astype("<f4").tobytes()
    journal.append([entry(11, frame=encode(group_message("0-11-0-1-s", token_versions=versions, **spans)))])
    lines = command.lines("show", "0-11-0-1-s", "--tokens")
    assert "policy    version 0-2" in lines
    assert [line for line in lines if line.startswith("rewards of spans:")] == [
        "rewards of spans: 0.500 at token 1, 0.000 at token 2"
    ]
    assert "log-probs of the teacher: mean -1.000, lowest -2.000, sum -3.000" in lines
    assert [line.split(": ")[1] for line in lines if line.startswith("its 2 likeliest tokens")] == [
        "probability 0.750 in the mean"
    ] * 2  # of 0.5, 0.75 and 1, and of 0.75
    assert [line for line in lines if line.startswith("policies:")] == [
        "policies: version 0 sampled 2 tokens, version 2 sampled 1 tokens",
        "policies: version 1 sampled 1 tokens",
    ]
    start = lines.index("  3 4 5") + 1
    assert lines[start : start + 4] == [
        "token  id  version  log-prob  text",
        "    0   3        0    -0.100",
        "    1   4        0    -0.200",
        "    2   5        2    -0.300",
    ]
    assert command.lines("show", "0-7-0-1-s")[1] == "state     claimed, step 3, position 0, try 1 of 2"


def test_show_an_episode_of_two_records_with_results_of_tools(journal: Journal, command: Command) -> None:
    frame = encode(
        group_message(
            "0-11-0-1-s",
            completion_lengths=np.array([2, 3, 1], "<i4").tobytes(),
            completion_ids=np.array([3, 4, 3, 5, 6, 7], "<i4").tobytes(),
            logprobs=np.array([-0.5, 0, 0, -0.25, -0.75, -1], "<f4").tobytes(),
            truncated=bytes([0, 1, 0]),
            sampled=bytes([1, 0, 0, 1, 1, 1]),
            episodes=np.array([0, 0, 1], "<i4").tobytes(),
        )
    )
    journal.append([entry(11, frame=frame, num_tokens=6)])
    lines = command.lines("show", "0-11-0-1-s", "--tokens")
    assert [line for line in lines if line.startswith("completion")] == [
        "completion 1 of 2, record 1 of 2, 2 tokens, 1 of them sampled",
        "completion 1 of 2, record 2 of 2, 3 tokens, 2 of them sampled, cut off at the limit",
        "completion 2 of 2, 1 tokens",
    ]
    assert "log-probs: mean -0.500, lowest -0.750, sum -1.000" in lines
    start = lines.index("  3 5 6") + 2
    assert [line.split() for line in lines[start : start + 3]] == [
        ["0", "3"],
        ["1", "5", "0", "-0.250"],
        ["2", "6", "0", "-0.750"],
    ]


class Letters:
    """A tokenizer: 1 is A, 2 is B, ...; 6 wants to clear the screen."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("\x1b[2J" if token == 6 else chr(64 + token) for token in tokens)


def test_show_with_text(journal: Journal, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.journal.show.load_tokenizer", lambda facts: Letters())
    lines = command.lines("show", "0-7-0-1-s", "--tokens")
    assert not any(line.startswith("token ids") for line in lines)
    assert lines[lines.index("prompt, 2 tokens") + 1] == "  AB"
    assert "  CDE" in lines
    assert "    2   5        1    -0.300  'E'" in lines
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


def test_show_says_which_attempt_at_the_prompt_it_is_and_every_step_that_trained_it(
    journal: Journal, command: Command
) -> None:
    back = entry(
        11, 2, reroll=2, grade=Grade("failed", 2, 0),
        frame=encode(group_message("0-11-2-1-s", 2)),
    )  # fmt: skip
    journal.append([back])
    journal.claim(RecordedBatch(4, 4, ["0-11-2-1-s"], 1))
    journal.end_step(4)
    claim(journal, 7, 7, 10)
    for step, last_step in ((5, 5), (8, 9)):
        journal.claim(RecordedBatch(step, last_step, ["0-11-2-1-s"], 0))
    lines = command.lines("show", "0-11-2-1-s")
    assert lines[1:3] == ["state     trained, step 4, position 0", "replayed  step 5, steps 8 to 9"]
    assert lines[4:6] == [
        "verdict   failed, 0 successes of 2 scored",
        "prompt    11 in epoch 0, attempt 3, lease 1",
    ]
