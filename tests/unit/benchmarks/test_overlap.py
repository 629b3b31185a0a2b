"""The pure parts of `benchmarks.overlap`, with numbers worked by hand."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import overlap_base
from benchmarks.overlap_arms import Step, arm, balanced_layers, is_equal_reward, ratio
from benchmarks.overlap_base import fitting_share
from benchmarks.suite import benchmarks, run, summary


@pytest.mark.parametrize(("generation_s", "layers"), [(9.0, 6), (9.9, 6), (6.1, 4), (6.0, 3), (0.1, 1)])
def test_the_backward_pass_is_cut_until_training_takes_as_long_as_generation(generation_s: float, layers: int) -> None:
    # Of 9 s with a LoRA in six layers 3 are forward, and every layer has 1 s of backward.
    assert balanced_layers(generation_s, 9.0, 6) == layers


def test_an_arm_is_measured_from_the_end_of_its_warm_up() -> None:
    steps = [
        Step(10, 0.1, 9, 1),
        Step(12, 0.2, 1.0, 1.0),
        Step(15, 0.5, 0.5, 2.0),
        Step(18, 0.6, 0.5, 2.0),
        Step(23, 0.7, 2.0, 2.5),
    ]
    numbers = arm(steps, 2, [(0, 11), (13, 15), (14, 17), (20, 30)])
    assert numbers["walls_s"] == [3, 3, 5]
    assert numbers["wall_s"] == pytest.approx(11 / 3)
    assert numbers["generation_s"] == pytest.approx((4 + 3) / 3)
    assert numbers["training_s"] == pytest.approx(6.5 / 3)
    assert numbers["producer_idle_share"] == pytest.approx(4 / 11)
    assert numbers["trainer_wait_share"] == pytest.approx(3 / 11)
    assert numbers["efficiency"] == pytest.approx(7 / 11)
    assert numbers["rewards"] == [0.1, 0.2, 0.5, 0.6, 0.7]


def test_a_ratio_is_one_of_totals_with_the_quartiles_of_steps() -> None:
    slow, fast = ({"wall_s": sum(walls) / 3, "walls_s": walls} for walls in ([4.0, 6.0, 8.0], [2.0, 2.0, 2.0]))
    assert ratio(slow, fast) == {"mean": 3.0, "low": 2.5, "high": 3.5}


def test_rewards_are_equal_within_two_standard_errors() -> None:
    one = {"reward_mean": 0.80, "reward_spread": 0.03}  # with 0.04: 2 * 0.05 / sqrt(8) = 0.0354
    assert is_equal_reward(one, {"reward_mean": 0.835, "reward_spread": 0.04})
    assert not is_equal_reward(one, {"reward_mean": 0.836, "reward_spread": 0.04})


def test_the_reward_is_the_share_of_letters_that_the_prompt_names() -> None:
    assert fitting_share(["abcd:"] * 3, ["abxa", "", "xyz"]) == [0.75, 0.0, 0.0]


def test_the_larger_model_computes_what_the_small_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_WIDTH", 32), ("_MLP_WIDTH", 64), ("_HEAD_WIDTH", 4), ("NUM_LAYERS", 3)):
        monkeypatch.setattr(overlap_base, name, size)
    torch.manual_seed(0)
    small = overlap_base._model(overlap_base._SMALL_LAYERS, overlap_base._SMALL)
    for parameter in small.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(len(overlap_base.VOCAB), (2, 9))
    with torch.no_grad():
        expected, found = (model(ids).logits for model in (small, overlap_base.grown(small)))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_held_out_prompts_are_not_trained_on() -> None:
    train, held_out = overlap_base.make_prompts(0)
    assert len(train) + len(held_out) == 14_950  # 26 choose 4
    assert not {frozenset(prompt) for prompt in train} & {frozenset(prompt) for prompt in held_out}


def test_the_suite_runs_every_benchmark_of_the_makefile(tmp_path: Path) -> None:
    makefile = "unit: ## no\nbench-b: $(STAMP) ## x\n\tfalse\nbench: all\n\nbench-a: ## y\n\ttrue\n"
    assert benchmarks(makefile) == ["bench-b", "bench-a"]
    commands = {"bench-a": ["true"], "bench-b": ["sh", "-c", "echo why; exit 3"]}
    results = [run(name, command, tmp_path) for name, command in commands.items()]
    assert [(one["benchmark"], one["exit_code"]) for one in results] == [("bench-a", 0), ("bench-b", 3)]
    assert (tmp_path / "bench-b.log").read_text() == "why\n"
    text = summary(results)
    assert "| bench-a | done |" in text
    assert "| bench-b | FAILED (3) |" in text
    json.dumps(results)
