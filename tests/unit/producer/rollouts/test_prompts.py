"""Prompts become the token ids that TRL would train on, or a failure that says what to change."""

import pytest
from tokenizers import processors

from producer.groups import LeaseFailure
from producer.rollouts.prompts import PromptFormat
from tests.unit.producer.rollouts.test_chat import tokenizer as tokenizer_with

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}={% endif %}"
)
ENDS = 128  # begins every string, and is no text


@pytest.fixture(scope="module")
def tokenizer():
    made = tokenizer_with(TEMPLATE)
    post = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", ENDS)])
    made.backend_tokenizer.post_processor = post
    return made


def refusal(prompts: PromptFormat, prompt, max_completion_length=8) -> LeaseFailure:
    with pytest.raises(LeaseFailure) as caught:
        prompts.encode(prompt, max_completion_length)
    return caught.value


def test_strings_get_the_special_tokens_of_the_tokenizer(tokenizer):
    assert PromptFormat(tokenizer, 64, {}).encode("1+2=", 8) == [ENDS, *map(ord, "1+2=")]


def test_messages_go_through_the_chat_template_with_its_arguments(tokenizer):
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    assert PromptFormat(tokenizer, 64, {}).encode(messages, 8)[-3:] == [*map(ord, "12=")]
    assert PromptFormat(tokenizer, 64, {"shout": True}).encode(messages, 8)[-4:] == [*map(ord, "12!=")]


def test_the_longest_prompt_that_fits_is_taken(tokenizer):
    prompts = PromptFormat(tokenizer, 16, {})
    assert len(prompts.encode("1" * 7, 8)) == 8
    failure = refusal(prompts, "1" * 8)
    assert failure.reason == "prompt_too_long"
    assert "9 tokens" in failure.detail
    assert "leaves 8" in failure.detail


@pytest.mark.parametrize("prompt", [7, None, {}, [], ["1"], [{"content": "1"}], [{"role": "user"}]])
def test_malformed_prompts_are_failures(tokenizer, prompt):
    failure = refusal(PromptFormat(tokenizer, 64, {}), prompt)
    assert failure.reason == "bad_prompt"
    assert "expected a string or a list of messages" in failure.detail


def test_a_template_that_raises_is_a_failure(tokenizer):
    strict = "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('no ' + m['role']) }}{% endif %}{% endfor %}"
    failure = refusal(PromptFormat(tokenizer, 64, {"chat_template": strict}), [{"role": "system", "content": "1"}])
    assert failure.reason == "bad_prompt"
    assert "no system" in failure.detail


def test_an_empty_prompt_is_a_failure(tokenizer):
    class NoTokens:
        def __call__(self, text):
            return {"input_ids": []}

    assert "no tokens" in refusal(PromptFormat(NoTokens(), 64, {}), "").detail


def test_what_an_image_is_put_in_place_of_is_a_failure(tokenizer):
    prompts = PromptFormat(tokenizer, 64, {}, placeholders=frozenset({ord("7"), 151_655}))
    assert prompts.encode("1+2=", 8)
    failure = refusal(prompts, "1+7=")
    assert failure.reason == "bad_prompt"
    assert "the prompt has token 55 ('7'), in whose place an image or video is put; prompts are text" in failure.detail


def test_a_token_that_the_model_does_not_have_is_a_failure(tokenizer):
    """Special tokens were added to the tokenizer, and the embeddings of the model were not enlarged."""
    prompts, added = PromptFormat(tokenizer, 64, {}, vocab_size=129), tokenizer.decode([129])
    assert prompts.encode("1+7=", 8)
    failure = refusal(prompts, f"1+8={added}")
    assert failure.reason == "bad_prompt"
    assert (
        f"token 129 ('{added}'): the tokenizer knows 130 tokens, and the model has embeddings of 129" in failure.detail
    )
    assert "resize_token_embeddings" in failure.detail


def test_completions_are_text_or_one_assistant_message_each(tokenizer):
    prompts = PromptFormat(tokenizer, 64, {})
    ids = [[*map(ord, "12"), ENDS], [ord("3")]]
    assert prompts.decode("1", ids) == ["12", "3"]
    assert prompts.decode([{"role": "user", "content": "1"}], ids) == [
        [{"role": "assistant", "content": "12"}],
        [{"role": "assistant", "content": "3"}],
    ]
