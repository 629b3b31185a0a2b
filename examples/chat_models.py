"""Small chat models that are trained here in seconds, without a download.

Guarantee: of a conversation the model is trained on what it says itself, and on nothing else.
"""

from collections.abc import Callable, Sequence

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.arithmetic.build_model import make_model

LENGTH = 64  # of the longest conversation
_SPECIAL = ("<pad>", "<|end|>", "<unk>")

Part = tuple[str, bool]
"""A part of a conversation, and whether the model says it."""


def chat_tokenizer(words: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each word; text besides them is unknown. Turns end with `<|end|>`."""
    words = [*_SPECIAL, *words]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )
    tokenizer.add_tokens(
        [AddedToken(word, normalized=False) for word in words if len(word) > 1 and word not in _SPECIAL]
    )
    return tokenizer


def chat_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Make a model of the tokenizer's words with random weights."""
    ids = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    return make_model(len(tokenizer), inner=256, length=LENGTH, **ids)


def corpus(tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Part]]) -> torch.Tensor:
    """Return token ids and loss mask of conversations: (2, rows, length)."""
    rows = []
    for parts in conversations:
        pieces = [(tokenizer(text)["input_ids"], int(by_model)) for text, by_model in parts]
        ids = [token for piece, _ in pieces for token in piece]
        rows.append((ids, [by_model for piece, by_model in pieces for _ in piece]))
    length = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    padded = [(ids + [pad] * (length - len(ids)), said + [0] * (length - len(ids))) for ids, said in rows]
    return torch.tensor([[ids for ids, _ in padded], [said for _, said in padded]])


def loss_on(
    model: Qwen2ForCausalLM, corpus_of: Callable[[int], torch.Tensor], batch: int = 48
) -> Callable[[int], torch.Tensor]:
    """Return the loss of a step: the mean over the model's own tokens of some rows of the corpus of that step."""

    def loss_of(step: int) -> torch.Tensor:
        data = corpus_of(step)
        ids, said = data[:, torch.randint(data.shape[1], (batch,))]
        logits = model(ids[:, :-1], use_cache=False).logits
        targets = ids[:, 1:].masked_fill(said[:, 1:] == 0, -100)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss_of
