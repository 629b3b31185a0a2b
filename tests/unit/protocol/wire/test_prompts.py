"""Prompts are told apart by their form, and become tokens as in TRL."""

from typing import Any

import pytest

from protocol.wire.messages import is_conversational, media_in, prompt_token_ids

ASKED = [{"role": "user", "content": "2+3"}]


class Tokenizer:
    """A letter is a token; a rendered message ends with 0, and a generation prompt is 1."""

    def __call__(self, text: str) -> dict[str, Any]:
        return {"input_ids": list(map(ord, text))}

    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool, return_dict: bool, shout: bool = False
    ) -> Any:
        assert tokenize
        assert return_dict, "or it is a list, from transformers 5 on"
        texts = [[message["content"] + "!" * shout for message in messages] for messages in conversation]
        rows = [[token for text in each for token in (*map(ord, text), 0)] for each in texts]
        return {"input_ids": [row + [1] * add_generation_prompt for row in rows]}


def test_the_tokens_of_text_and_of_messages() -> None:
    assert prompt_token_ids(Tokenizer(), "2+3", {"shout": True}) == [*map(ord, "2+3")]
    assert prompt_token_ids(Tokenizer(), ASKED * 2, {}) == [*map(ord, "2+3"), 0, *map(ord, "2+3"), 0, 1]
    assert prompt_token_ids(Tokenizer(), ASKED, {"shout": True}) == [*map(ord, "2+3!"), 0, 1]


@pytest.mark.parametrize(
    "prompt", ["2+3", [], None, [{"role": "user"}], [{"content": "2+3"}], [*ASKED, "2+3"], ASKED[0]]
)
def test_what_is_no_list_of_messages(prompt: Any) -> None:
    assert not is_conversational(prompt)
    assert media_in(prompt) is None


def test_the_first_part_of_a_message_that_is_no_text_is_named() -> None:
    assert is_conversational(ASKED)
    assert media_in(ASKED) is None
    text = {"role": "user", "content": [{"type": "text", "text": "2+3"}, {"text": "2+3"}, "2+3"]}
    assert media_in([text]) is None
    assert media_in([text, {"role": "user", "content": [{"type": "image"}, {"type": "video"}]}]) == "image"
