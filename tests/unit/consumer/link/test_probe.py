"""The probe's tokens come from the dataset and are the same in every process; measuring disturbs nothing."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from consumer.link.snapshots import NUM_TOKENS, Probe, probe_tokens
from protocol.errors import DatasetError


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(character) for character in text]}


class Prompts(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        prompt = super().__getitem__(index)
        if prompt is None:
            raise DatasetError(f"row {index} has no usable prompt")
        return prompt, {}


@pytest.mark.parametrize(
    ("prompts", "seed", "expected"),
    [
        (["ab" * 40, "c"], 0, "ab" * 4),
        (["ab" * 40, "c"], 1, "c" + "ab" * 3 + "a"),
        (["abc"], 5, "abc" * 2 + "ab"),
        ([None, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]], 0, "hi\nho" + "hi\n"),
    ],
)
def test_tokens_are_those_of_the_first_prompts(prompts: list[Any], seed: int, expected: str) -> None:
    tokens = probe_tokens(Prompts(prompts), tokenizer, seed)
    assert (tokens.dtype, len(tokens)) == (np.int32, NUM_TOKENS)
    assert "".join(map(chr, tokens)) == expected


class Model(torch.nn.Module):
    """Its logits for the next token are those of `table`, halved in training."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [2.0, 0.0, 0.0]])

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not torch.is_grad_enabled()
        logits = self.table[input_ids] / (2 if self.training else 1)
        return type("Output", (), {"logits": logits.half()})


@pytest.mark.parametrize("trains", [False, True])
def test_log_probs_by_hand(trains: bool) -> None:
    model = Model().train(trains)
    measured = Probe(np.array([2, 0, 1, 1], np.int32), 1, model, contextlib.nullcontext).measure(7)
    assert measured is not None
    # exp(2) / (exp(2) + 2), 1 / 3, e / (e + 2)
    torch.testing.assert_close(measured.logprobs, torch.tensor([-0.2395, -1.0986, -0.5514]), atol=1e-4, rtol=0)
    assert measured.logprobs.dtype == torch.float32
    assert model.training == trains


@pytest.mark.parametrize(("every", "versions"), [(0, []), (1, [0, 1, 2, 3]), (3, [0, 3])])
def test_it_is_measured_every_so_many_versions(every: int, versions: list[int]) -> None:
    probe = Probe(np.array([0, 1], np.int32), every, Model(), contextlib.nullcontext)
    assert [version for version in range(4) if probe.measure(version) is not None] == versions
