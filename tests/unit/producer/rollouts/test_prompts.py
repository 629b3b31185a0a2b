"""Prompts become the token ids that TRL would train on, or a failure that says what to change."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from producer.interfaces import LeaseFailure
from producer.rollouts.prompts import PromptFormat

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(["<s>", "</s>", "<unk>", *"0123456789+=!"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def refusal(prompts: PromptFormat, prompt, max_completion_length=8) -> LeaseFailure:
    with pytest.raises(LeaseFailure) as caught:
        prompts.encode(prompt, max_completion_length)
    return caught.value


def test_strings_get_the_special_tokens_of_the_tokenizer(tokenizer):
    assert PromptFormat(tokenizer, 64, {}).encode("1+2=", 8) == [0, 4, 13, 5, 14]


def test_messages_go_through_the_chat_template_with_its_arguments(tokenizer):
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    assert PromptFormat(tokenizer, 64, {}).encode(messages, 8)[-3:] == [4, 5, 14]
    assert PromptFormat(tokenizer, 64, {"shout": True}).encode(messages, 8)[-4:] == [4, 5, 15, 14]


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


def test_completions_are_text_or_one_assistant_message_each(tokenizer):
    prompts = PromptFormat(tokenizer, 64, {})
    ids = [[4, 5, 1], [6]]
    assert prompts.decode("1", ids) == ["12", "3"]
    assert prompts.decode([{"role": "user", "content": "1"}], ids) == [
        [{"role": "assistant", "content": "12"}],
        [{"role": "assistant", "content": "3"}],
    ]
