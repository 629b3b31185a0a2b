"""What the model should learn from each row, and what is refused with the row's place."""

from typing import Any

import pytest

from protocol.errors import DatasetError
from slipstream.sft import training_rows

ASK = [{"role": "user", "content": "1+1="}]
ANSWER = [{"role": "assistant", "content": "2"}]


class Rows:
    """A prompt dataset."""

    def __init__(self, *rows: tuple[Any, dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        return self._rows[prompt_id]

    def place(self, prompt_id: int) -> str:
        return f"row {prompt_id} of train.jsonl"


def made(*rows: tuple[Any, dict[str, Any]], **section: Any) -> list[dict[str, Any]]:
    return list(training_rows(Rows(*rows), section))


def refused(*rows: tuple[Any, dict[str, Any]], **section: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        made(*rows, **section)
    return str(caught.value)


def test_texts() -> None:
    assert made(("1+1=", {"completion": "2", "n": 1})) == [{"prompt": "1+1=", "completion": "2"}]
    assert made(("1+1=", {"answer": "2"}), completion_column="answer") == [{"prompt": "1+1=", "completion": "2"}]


def test_messages_take_a_text_or_messages() -> None:
    expected = [{"prompt": ASK, "completion": ANSWER}]
    assert made((ASK, {"completion": "2"})) == made((ASK, {"completion": ANSWER})) == expected


def test_whole_conversations() -> None:
    row = (ASK, {"messages": ASK + ANSWER})
    assert made(row, messages_column="messages") == [{"prompt": ASK, "completion": ANSWER}]
    for messages in (ASK, ANSWER, "1+1=2", None):
        message = refused((ASK, {"messages": messages}), messages_column="messages")
        assert message.startswith("row 0 of train.jsonl: sft.messages_column: 'messages' must be a list of messages")


def test_no_completion() -> None:
    assert refused(("a", {"completion": "b"}), ("c", {"answer": "d"})) == (
        "row 1 of train.jsonl: sft.completion_column: there is no column 'completion'; beside the prompt there are 'answer'"
    )
    assert refused(("a", {"completion": ""})).endswith("must be a text that is not empty, got ''")
    assert refused(("a", {"completion": ANSWER})).startswith(
        "row 0 of train.jsonl: sft.completion_column: 'completion' must"
    )
    assert "must be a text or a list of messages that is not empty, got 2" in refused((ASK, {"completion": 2}))


def test_forms_are_not_mixed() -> None:
    assert refused(("a", {"completion": "b"}), (ASK, {"completion": "2"})) == (
        "row 1 of train.jsonl: rows before have prompts of another form; text and messages cannot be mixed"
    )
