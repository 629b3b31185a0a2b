"""Completions of a trial end where those of the run would, and given ones are read and shown as they are."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from rich.console import Console

from consumer.prompts.dataset import PromptDataset
from protocol.config.data import DatasetSection
from protocol.errors import DatasetError
from protocol.wire.messages import Logged
from replay.watches import RewardWatch
from slipstream.reward import Group, Trial, given, report, show, until_stop

LETTERS: Any = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("a b c", [], "a b c"),
        ("a</x>b</x>", ["</x>"], "a</x>"),
        ("a</x>b", ["b", "</x>"], "a</x>"),
        ("</x>", ["</x>"], "</x>"),
        ("ab", ["c"], "ab"),
        ("", ["c"], ""),
    ],
)
def test_a_completion_keeps_the_first_text_that_ends_it(text: str, stop: list[str], kept: str) -> None:
    assert LETTERS.decode(until_stop([ord(letter) for letter in text], stop, LETTERS)) == kept


def no_tokens(text: str, **_: Any) -> dict[str, list[int]]:
    return {"input_ids": []}


def test_a_text_may_hold_any_line_end_and_the_file_a_mark_of_its_encoding(tmp_path: Path) -> None:
    said = ["one\u2028two", "three\u0085four", "five\x0bsix"]
    row = json.dumps({"prompt": "a\u2029b", "completions": said}, ensure_ascii=False)
    (tmp_path / "given.jsonl").write_text(f"{row}\r\n{row}", encoding="utf-8-sig")
    groups = given(tmp_path / "given.jsonl", no_tokens)
    assert [(group.prompt, group.completions) for group in groups] == [("a\u2029b", said)] * 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            '{"prompt": "a", "completions": ["b"], "answer": 1' + "0" * 30 + "}",
            ", line 2: the value of 'answer' cannot be",
        ),
        ('{"prompt": ' + "[" * 100_000, ", line 2: maximum recursion"),
    ],
)
def test_what_no_producer_could_be_leased_is_refused_with_its_line(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "given.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(DatasetError) as caught:
        given(tmp_path / "given.jsonl", no_tokens)
    assert f"given.jsonl{problem}" in str(caught.value)


def test_given_columns_are_read_as_those_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    values = [{"answer": "2031-01-05"}, {"answer": ["007", 7.0]}, {"answer": 2**53 + 1, "at": None}, {"hint": True}]
    rows = [{"prompt": "a", "completions": ["b"]} | columns for columns in values]
    path = tmp_path / "given.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = PromptDataset(DatasetSection(path=str(path)))
    for number, group in enumerate(given(path, no_tokens)):
        assert (group.prompt, group.columns | {"completions": ["b"]}) == prompts[number]


def test_spans_are_reported_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given.jsonl").write_text(json.dumps({"prompt": "a", "completions": ["one", "b"]}))
    groups = given(tmp_path / "given.jsonl", no_tokens)
    groups[0].rewards, groups[0].spans = np.zeros((2, 1), np.float32), [[(7, 1.0), (3, 0.25)], []]
    found = report(Trial(("right",), [1.0], groups))
    first, second = found["groups"][0]["completions"]
    assert first["spans"] == [(3, 0.25), (7, 1.0)]
    assert "spans" not in second
    assert not found["groups"][0]["signal"]
    assert report(Trial(("right",), [1.0], groups, credit="per_step"))["groups"][0]["signal"]
    for spans, signal in (([[(3, 0.5)], [(4, 0.5)]], True), ([[(3, 0.0)], []], False)):
        groups[0].spans = spans
        assert report(Trial(("right",), [1.0], groups, credit="given"))["groups"][0]["signal"] == signal
    show(found, Console(width=120))
    assert "3: 0.25, 7: 1" in capsys.readouterr().out


def test_a_completion_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "a", "completions": ["\x1b[2Jgone\r\n", "b"]}
    (tmp_path / "given.jsonl").write_text(json.dumps(row))
    groups = given(tmp_path / "given.jsonl", no_tokens)
    groups[0].rewards = np.zeros((2, 1), np.float32)
    show(report(Trial(("right",), [1.0], groups)), Console(width=80))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[2Jgone\r\n" in out


def test_a_reward_without_any_number_is_said_first_and_is_no_lack_of_signal(capsys: pytest.CaptureFixture[str]) -> None:
    groups = [Group("p", {}, ["a", "b"], [[1], [2]]) for _ in range(2)]
    groups[0].rewards, groups[1].rewards = (np.full((2, 2), np.nan, np.float32) for _ in range(2))
    groups[0].logged = Logged({"accuracy": 0.5}, {"wanted": ("7", "8")})
    for group in groups:
        group.rewards[:, 0] = [0, 1]
    watch = RewardWatch([("good", None), ("dead", None)])
    found = report(Trial(("good", "dead"), [1.0, 1.0], groups, watch))
    assert [group["signal"] for group in found["groups"]] == [True, True]
    assert len(found["dead_rewards"]) == 1
    show(found, Console(width=120))
    out = capsys.readouterr().out
    assert "reward dead gave no number to any completion of all 2 groups" in out.splitlines()[0]
    assert "wanted" in out
    assert "accuracy: 0.5" in out
    groups[1].rewards[:, 0] = np.nan
    warnings = report(Trial(("good", "dead"), [1.0, 1.0], groups, watch))["warnings"]
    assert any("group 2: no reward" in warning for warning in warnings)
    assert not any("all equal" in warning for warning in warnings)
