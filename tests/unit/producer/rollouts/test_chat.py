"""What a template adds after a turn is found exactly, and a rewritten history is noticed."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from producer.groups import LeaseFailure
from producer.rollouts.chat import ChatFormat, assistant_message, tool_message
from protocol.errors import ConfigError

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
PLAIN = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Qwen3's: the last turn reads differently while it is the last, and thoughts go when the user speaks again.
THINKING = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(template: str, eos: str = "<|end|>") -> PreTrainedTokenizerFast:
    """A token for each letter, and for each of the ends of turns."""
    vocab = {chr(code): code for code in range(128)} | {"<|end|>": 128, "<|eos|>": 129}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, additional_special_tokens=["<|end|>", "<|eos|>"], chat_template=template
    )


def chat(template: str, **options: str) -> ChatFormat:
    return ChatFormat(tokenizer(template, **options), 64, {}, TOOLS, None)


ASKED = [{"role": "user", "content": "2+3"}]
CALL = assistant_message("I add", [("add", {"a": 2})], 0)
ANSWERED = [*ASKED, CALL, tool_message("add", "5", 0)]


@pytest.mark.parametrize("template", [PLAIN, THINKING])
def test_the_tokens_of_a_result_are_what_follows_the_sampled_end_of_the_turn(template: str) -> None:
    format_ = chat(template)
    before = format_.prompt(ASKED)
    after = format_.go_on(before, ANSWERED, 1, format_.end_of_turn(128))
    assert after.text == format_.prompt(ANSWERED)
    assert after.token_ids == format_.token_ids("\n[tool]5<|end|>\n[assistant]")


def test_of_a_text_that_is_far_too_long_only_the_beginning_becomes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    format_ = chat(PLAIN)
    assert len(format_.token_ids("a" * 1000)) == 1000
    assert len(format_.token_ids("a" * 10**6)) == 16 * 64
    read = list[int]()

    def coarse(text: str, **_: object) -> dict[str, list[int]]:
        read.append(len(text))
        return {"input_ids": [0] * (len(text) // 100)}

    monkeypatch.setattr(format_, "tokenizer", coarse)
    assert len(format_.token_ids("a" * 6000)) == 60, "it may fit, so all of it is read"
    assert read == [1024, 4096, 6000]
    assert len(format_.token_ids("a" * 10**6)) == 163
    assert read[3:] == [1024, 4096, 16384]


def test_several_results_follow_one_turn_behind_the_templates_own_end() -> None:
    format_ = chat(PLAIN)
    messages = [*ANSWERED, tool_message("add", "1<|end|>", 1)]
    for end in ("<|end|>", format_.end_of_turn(129)):  # which the template does not write
        after = format_.go_on(format_.prompt(ASKED), messages, 2, end)
        assert after.token_ids == format_.token_ids("\n[tool]5<|end|>\n[tool]1<|end|><|end|>\n[assistant]")


def test_a_history_that_is_rewritten_begins_a_new_record() -> None:
    format_ = chat(THINKING)
    thought = assistant_message("<think>hm</think>I add", [], 0)
    first = [*ASKED, thought, tool_message("add", "5", 0)]
    before = format_.go_on(format_.prompt(ASKED), first, 1, "<|end|>").text
    assert "<think>hm</think>" in before
    second = [*first, assistant_message("five", [], 1), {"role": "user", "content": "sure?"}]
    after = format_.go_on(before, second, 1, "<|end|>")
    assert after.token_ids is None
    assert "hm" not in after.text


def test_a_turn_whose_end_is_not_to_be_found_begins_a_new_record() -> None:
    format_ = chat(PLAIN.replace("<|end|>", "."), eos="<|eos|>")
    assert format_.go_on(format_.prompt(ASKED), ANSWERED, 1, "<|eos|>").token_ids is None


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (PLAIN.replace("{{ t.function.name }}", ""), "leaves out the tools"),
        (PLAIN.replace("{{ m.content }}", ""), "leaves out the tools or their results"),
        ("{{ raise_exception('no tools') }}", "refuses a conversation with tools: TemplateError: no tools"),
    ],
)
def test_a_template_without_tools_is_refused_at_the_start(template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chat(template).check()
    ChatFormat(tokenizer(template), 64, {}, [], None).check()


def test_a_good_template_passes_and_one_that_raises_fails_its_lease() -> None:
    chat(PLAIN).check()
    with pytest.raises(LeaseFailure, match="chat template refused the messages"):
        chat("{{ raise_exception('no') }}").prompt(ASKED)


def test_what_an_environment_says_with_a_token_that_the_model_does_not_have_is_refused() -> None:
    format_ = ChatFormat(tokenizer(PLAIN), 64, {}, TOOLS, None, vocab_size=ord("z"))
    assert format_.token_ids("a") == [ord("a")]
    with pytest.raises(LeaseFailure, match=r"has token 122 \('z'\).*embeddings of 122.*resize_token_embeddings"):
        format_.token_ids("z")
