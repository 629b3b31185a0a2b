"""All sides of the benchmark of a training step have the same batch and compute the same."""

import multiprocessing
import os
import sys
import warnings

import numpy as np
import pytest
import torch

from benchmarks import trainer_step, trainer_step_side
from benchmarks.trainer_step import SIZES, measure, unequal_losses
from benchmarks.trainer_step_async import Kernel, samples_of
from benchmarks.trainer_step_limit import _kind
from benchmarks.trainer_step_side import _generated, config_of, groups_of


def test_trls_rows_are_those_of_the_groups(tmp_path) -> None:
    size = SIZES["cpu"] | {"correct": True, "attention": None}
    groups = groups_of(size)
    prompts, completions, _, _, logprobs, *_ = _generated(groups, with_logprobs=True)
    assert len(prompts) == len(completions) == config_of(size, tmp_path).completions_per_step == 32
    assert prompts[8:16] == [groups[1].prompt_ids.tolist()] * 8
    assert np.concatenate(completions[:8]).tolist() == groups[0].completion_ids.tolist()
    assert [len(part) for part in logprobs] == [len(part) for part in completions]
    assert max(map(len, completions)) > 3 * np.median([len(part) for part in completions]), "a long tail"


def test_trls_asynchronous_trainer_gets_the_same_samples() -> None:
    [group, *_] = groups_of(SIZES["cpu"])
    samples = list(samples_of(0, group))
    assert len(samples) == group.num_completions
    assert sum(int(sample["completion_mask"].sum()) for sample in samples) == group.num_tokens
    ids = np.concatenate([sample["input_ids"][len(group.prompt_ids) :] for sample in samples])
    assert ids.tolist() == group.completion_ids.tolist()
    values = [sample["advantage"] for sample in samples]
    assert np.argsort(values).tolist() == np.argsort(group.rewards[:, 0]).tolist()


def test_the_stand_in_for_flash_attention_computes_each_segment_by_itself() -> None:
    torch.manual_seed(0)
    num_q, num_k = [3, 1, 150, 2], [3, 4, 200, 2]  # queries are the last of the keys
    q, k, v = (torch.randn(sum(n), heads, 8).double() for n, heads in ((num_q, 4), (num_k, 2), (num_k, 2)))
    starts = [torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (num_q, num_k)]
    found = Kernel.flash_attn_varlen_func(q, k, v, *starts, 0, 0, softmax_scale=0.3, causal=True, window_size=(-1, -1))
    expected = []
    for one, keys, values in zip(q.split(num_q), k.split(num_k), v.split(num_k), strict=True):
        keys, values = (each.repeat_interleave(2, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", one, keys) * 0.3
        sees = torch.ones_like(scores[0], dtype=torch.bool).tril(len(keys) - len(one))
        expected.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), values))
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-12, rtol=1e-12)


def test_operations_are_counted_by_their_kind() -> None:
    kinds = [
        _kind("aten::mm", [[100, 256], [256, 16]], rank=16, vocabulary=8192),
        _kind("aten::mm", [[100, 256], [256, 8192]], rank=16, vocabulary=8192),
        _kind("aten::addmm", [[100, 256], [256, 64]], rank=16, vocabulary=8192),
        _kind("aten::_scaled_dot_product_flash_attention_for_cpu", [], rank=16, vocabulary=8192),
        _kind("aten::mul", [[100, 256], []], rank=16, vocabulary=8192),
        _kind("aten::index", [[100, 256], []], rank=16, vocabulary=8192),
    ]
    products = ["products with adapters", "products of the head", "products of the base"]
    assert kinds == [*products, "attention", "elementwise", "moving data"]


def test_a_step_that_computes_something_else_is_told() -> None:
    report = {"size": SIZES["cpu"], "losses": {"ours": 0.1, "trl": 0.1}, "gradient_norms": {"ours": 0.2, "trl": 0.2}}
    assert unequal_losses(report) == ""
    assert "gradient norms" in unequal_losses(report | {"gradient_norms": {"ours": 0.2, "trl": 0.21}})


class Fork:
    """Stands for `subprocess.Popen`: a side that need not import again what this process has."""

    def __init__(self, command: list[str], **_: object) -> None:
        (asked, asks), (answered, answers) = os.pipe(), os.pipe()
        self._process = multiprocessing.get_context("fork").Process(target=self._be, args=(command[5:], asked, answers))
        self._process.start()
        os.close(asked)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(asks, "w", buffering=1), os.fdopen(answered)

    @staticmethod
    def _be(arguments: list[str], asked: int, answers: int) -> None:
        warnings.simplefilter("ignore")
        sys.argv[1:], sys.stdin, sys.stdout = arguments, os.fdopen(asked), os.fdopen(answers, "w")
        trainer_step_side.main()

    def communicate(self) -> None:
        """End it. It does not see the end of its input, because a later fork has it open too."""
        self.stdin.close()
        self.stdout.close()
        self._process.kill()
        self._process.join()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_all_sides_compute_the_same_and_each_checkpoints_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_step.subprocess, "Popen", Fork)
    model = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 64, "dtype": "float32"}  # fmt: skip
    tokens = {"prompt_tokens": 40, "median_tokens": 8, "max_tokens": 16, "tokens_per_micro_batch": 150}
    size = SIZES["cpu"] | tokens | {"model": model, "device": "cpu", "correct": False, "attention": None}
    size["trainer"] = {"gradient_checkpointing": True}
    report = measure(size, 2, 1, ("ours", "trl_async", "trl"), limit=True)
    assert unequal_losses(report) == ""
    assert set(report["facts"]["ours"]) == {"rows", "tokens", "parameters", "checkpoints"}
    assert all(facts["checkpoints"] for facts in report["facts"].values())
    assert report["positions"]["trl_async"] < report["facts"]["ours"]["tokens"] < report["positions"]["trl"]
    assert 0 < report["limit_s"] < report["busy_s"]["ours"]
    assert sum(report["shares"].values()) == pytest.approx(1)
