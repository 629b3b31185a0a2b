"""Both layouts of the forward pass give the log-probs, entropies and gradients of the plain one, compared in float64."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from consumer.learn.forward import (
    Head,
    Layout,
    Logits,
    TokenLogprobs,
    Tokens,
    logits_of,
    rows_layout,
    token_logprobs,
    tree_layout,
)
from consumer.learn.tree import Row
from consumer.learn.tree_attention import choose_kernel
from consumer.learn.tree_kernels import FlexKernel, SegmentKernel
from tests.unit.consumer.float64 import in_float64
from tests.unit.consumer.learn.trees import rows_of_trees

TEMPERATURE = 0.8
TOLERANCE = (
    1e-11  # of float64: log-probs come within some 1e-14 of each other, gradients within that share of the largest
)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [0, 4, 5], [4, 5]]  # of which one begins with the id that pads
ROWS = [(0, [11, 12, 13]), (1, [14]), (0, [15, 16, 17, 18, 19]), (2, [20, 21]), (0, [22, 23]), (1, [24, 25, 26])]

pytestmark = pytest.mark.usefixtures("float64")


def tokens(prompts: list[list[int]] = PROMPTS) -> Tokens:
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(ROWS), width + 5, dtype=torch.long), torch.zeros(len(ROWS), width + 5, dtype=torch.long)
    for i, (prompt, completion) in enumerate(ROWS):
        row = prompts[prompt] + completion
        start = width - len(prompts[prompt])
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = 1
    return Tokens(ids, mask, mask[:, -5:])


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    found = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora).get_base_model().double()
    assert choose_kernel(found) is not None
    return found


def as_tree(tokens: Tokens) -> Layout:
    return tree_layout(tokens, SegmentKernel)


LAYOUTS = pytest.mark.parametrize("layout", [rows_layout, as_tree])


def head(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return TokenLogprobs.apply(*inputs, TEMPERATURE, True)


def plain(model: Any, rows: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row alone, from the whole logits."""
    logprobs, entropies = torch.zeros(len(ROWS), 5), torch.zeros(len(ROWS), 5)
    for i in range(len(ROWS)):
        ids = rows.ids[i][rows.mask[i].bool()][None]
        count = int(rows.in_loss[i].sum())
        log_p = (model(input_ids=ids).logits[0, -count - 1 : -1] / TEMPERATURE).log_softmax(-1)
        logprobs[i, :count] = log_p.gather(1, ids[0, -count:, None])[:, 0]
        entropies[i, :count] = -(log_p.exp() * log_p).sum(-1)
    return logprobs, entropies


def gradient(model: Any, values: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    weights = torch.arange(30.0).view(6, 5).sin()
    (values[0] * weights + values[1] * weights.square()).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.long
@pytest.mark.parametrize(
    "prompts", [PROMPTS, [[3, 4, 5], [5, 6, 7], [3, 4, 9]]], ids=["prompts of any length", "of one length"]
)
@LAYOUTS
def test_log_probs_entropies_and_gradients(
    model: Any, layout: Callable[[Tokens], Layout], prompts: list[list[int]]
) -> None:
    rows = tokens(prompts)
    ours, theirs = token_logprobs(model, layout(rows), head), plain(model, rows)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    expected = gradient(model, theirs)
    largest = expected.abs().max().item()
    assert largest > 1e-2
    torch.testing.assert_close(gradient(model, ours), expected, atol=TOLERANCE * largest, rtol=0)


@LAYOUTS
def test_the_embedding_of_the_id_that_pads_does_not_matter(model: Any, layout: Callable[[Tokens], Layout]) -> None:
    """What nothing has trained may be anything, and 0 times NaN is NaN, in gradients too."""
    rows = tokens([[3, 4, 5, 6, 7, 8, 9], [2, 4, 5], [4, 5]])
    values = token_logprobs(model, layout(rows), head)
    expected = gradient(model, values)

    def spoil(_module: Any, ids: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((ids[0] == 0)[..., None], torch.nan)

    with model.get_input_embeddings().register_forward_hook(spoil):
        found = token_logprobs(model, layout(rows), head)
        assert torch.equal(found[0], values[0])
        assert torch.equal(gradient(model, found), expected)


@LAYOUTS
def test_a_micro_batch_without_a_token_in_the_loss_has_a_gradient_of_zero(
    model: Any, layout: Callable[[Tokens], Layout]
) -> None:
    rows = tokens()._replace(loss_mask=torch.zeros(6, 5))
    values = token_logprobs(model, layout(rows), head)
    assert not torch.stack(values).any()
    assert not gradient(model, values).any()


def test_a_tree_has_each_prompt_once_and_no_padding() -> None:
    assert as_tree(tokens()).ids.shape == (1, sum(map(len, PROMPTS)) + sum(len(completion) for _, completion in ROWS))
    assert rows_layout(tokens()).ids.shape == (6, 12)


def test_the_same_with_gradient_checkpointing(model: Any) -> None:
    expected = token_logprobs(model, as_tree(tokens()), head)
    gradients = gradient(model, expected)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    try:
        found = token_logprobs(model, as_tree(tokens()), head)
        assert torch.equal(gradient(model, found), gradients)
        assert torch.equal(found[0], expected[0])
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
        model.eval()


@pytest.mark.long
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows_of_trees(vocabulary=9), data=st.data())
def test_random_rows_have_the_gradient_of_plain_rows(model: Any, rows: list[Row], data: Any) -> None:
    """Any of their tokens are in the loss, with any weights."""
    widths = [max(len(row[part]) for row in rows) for part in (0, 1)]
    ids, mask = torch.zeros(2, len(rows), sum(widths), dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(widths[0] - len(row.prompt), widths[0] + len(row.completion))
        ids[i, place], mask[i, place] = torch.from_numpy(np.concatenate(row)), 1
    in_loss = mask[:, widths[0] :].clone()
    chosen = data.draw(st.lists(st.booleans(), min_size=in_loss.numel(), max_size=in_loss.numel()))
    in_loss *= torch.tensor(chosen).view(in_loss.shape)
    of_rows, of_tree = (layout(Tokens(ids, mask, in_loss)) for layout in (rows_layout, as_tree))
    weights = torch.arange(1.0, in_loss.numel() + 1).sin().view(in_loss.shape)
    found = []
    for layout in (of_rows, of_tree):
        model.zero_grad()
        values = token_logprobs(model, layout, head)
        (values[0] * weights + values[1]).sum().backward()
        found.append([*values, torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])])
    largest = max(1.0, *(float(each.detach().abs().max()) for each in found[0]))
    torch.testing.assert_close(found[1], found[0], atol=TOLERANCE * largest, rtol=0)


def test_layouts_move_to_a_device_with_all_that_their_kernels_keep(model: Any) -> None:
    layout = tree_layout(tokens(), lambda tree: FlexKernel(tree, frozenset({4}))).on(torch.device("meta"))
    assert layout.tree is not None
    tensors = [value for value in layout if isinstance(value, torch.Tensor)] + list(layout.tree.tensors.values())
    assert {each.device.type for each in tensors} == {"meta"}


def build(family: str, **changes: Any) -> Any:
    """A small model whose embeddings are its head."""
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**shape | heads | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).double().eval()


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Llama", {}, Logits()),
        ("Gemma3Text", {}, Logits()),
        ("Gemma2", {"final_logit_softcapping": 0.3}, Logits(softcap=0.3)),
        ("Cohere", {"logit_scale": 0.0625}, Logits(scale=0.0625)),
        ("Granite", {"logits_scaling": 8.0}, Logits(scale=0.125)),
    ],
)
def test_logits_follow_from_the_output_of_the_head(family: str, changes: dict[str, Any], expected: Logits) -> None:
    """Log-probs by TRL's kernel are those of the model's own logits."""
    model, rows = build(family, **changes), tokens()
    with in_float64(sys.modules[type(model).__module__]):
        found = logits_of(model)
        assert found == expected
        theirs = plain(model, rows)

        options = SimpleNamespace(temperature=TEMPERATURE, cast_lm_head_to_fp32=False)
        own = Head(expected, options, entropy_trains=False)
        for layout in (rows_layout(rows), as_tree(rows)):
            assert layout.tree is None or choose_kernel(model) is not None
            torch.testing.assert_close(token_logprobs(model, layout, own), theirs, atol=TOLERANCE, rtol=0)
