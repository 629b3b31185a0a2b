"""Loss and gradients equal those of TRL's own GRPOTrainer, for every loss type and option that changes the arithmetic.

The reference is TRL beside vLLM: it spends an extra forward pass on the old log-probs and truncates or masks the ratio
itself. Its bias-corrected KL leaves the ratio out, so that is off here; test_kl.py has it on. Both compute in float64.
"""

import dataclasses
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumer.learn.importance import PRESETS
from consumer.learn.micro_batches import MicroBatch
from consumer.learn.trainer import SlipstreamTrainer
from replay.groups import RolloutGroup
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import (
    GRPOTrainer,
    correct_as,
    lora_parameters,
    loss_and_gradients,
    metrics_of,
    perturb,
    set_weights,
    slipstream_trainer,
    trl_inputs,
    trl_trainer,
)

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TOLERANCE = 1e-11  # of float64: sums of a few thousand products come within some 1e-14 of each other
EOS = 1

pytestmark = pytest.mark.usefixtures("float64")


def some_groups(num_groups: int = 2, *, seed: int = 0) -> list[RolloutGroup]:
    """Mixed lengths, one completion of one token, one that was cut."""
    draw = np.random.default_rng(seed)
    groups = []
    for index in range(num_groups):
        lengths = [1, 6, 3, 5] if index == 0 else draw.integers(2, 7, 4).tolist()
        completions = [[*draw.integers(3, 40, n - 1).tolist(), EOS] for n in lengths]
        completions[1][-1] = 7  # cut: the last token is no end
        group = rollout_group(
            completions,
            prompt=draw.integers(3, 40, 2 + 3 * index).tolist(),
            rewards=draw.normal(size=4).round(2).tolist(),
            truncated=[False, True, False, False],
            lease_id=f"s-{index}",
        )
        groups.append(dataclasses.replace(group, rewards=group.rewards.astype(np.float64)))  # and so the advantages
    return groups


def on_policy(trainer: SlipstreamTrainer, groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The same groups with the log-probs of the trainer's own policy, each sequence computed alone and unpadded."""
    weights = torch.cat([parameter.detach().flatten() for parameter in lora_parameters(trainer)]).numpy().tobytes()
    policy = _Policy(hash(weights), trainer.args.temperature, trainer)
    return [
        dataclasses.replace(
            group,
            logprobs=np.concatenate(
                [
                    _alone(policy, tuple(group.prompt_ids.tolist()), tuple(group.completion_ids[tokens].tolist()))
                    for tokens in group.records
                ]
            ),
        )
        for group in groups
    ]


@dataclasses.dataclass(frozen=True)
class _Policy:
    """Equal for equal policies, of whichever trainer: all start from one model."""

    weights: int
    temperature: float
    trainer: SlipstreamTrainer = dataclasses.field(compare=False)


@functools.cache
def _alone(policy: _Policy, prompt: tuple[int, ...], completion: tuple[int, ...]) -> np.ndarray:
    ids = {"prompt_ids": torch.tensor([prompt]), "completion_ids": torch.tensor([completion])}
    masks = {name.replace("ids", "mask"): torch.ones_like(values) for name, values in ids.items()}
    with torch.no_grad():
        return policy.trainer.forward_pass(ids | masks).logprobs[0].numpy()


def off_policy(trainer: SlipstreamTrainer, groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Sampled by something else: log-ratios of standard deviation 0.7, and one token that the sampler did not score."""
    draw = np.random.default_rng(9)
    result = []
    for group in on_policy(trainer, groups):
        logprobs = np.minimum(0, group.logprobs + draw.normal(0, 0.7, group.num_tokens))
        logprobs[2] = np.nan
        logprobs[~group.is_sampled] = 0
        result.append(dataclasses.replace(group, logprobs=logprobs))
    return result


def pair(folder: Path, model: Path, **options: Any) -> tuple[SlipstreamTrainer, GRPOTrainer]:
    config = run_config(folder, model, trainer=options, correction={"ratio_max": 1.5})
    return slipstream_trainer(config, model), trl_trainer(config, model)


def our_inputs(trainer: SlipstreamTrainer, groups: list[RolloutGroup]) -> list[MicroBatch]:
    return trainer._prepare_inputs(trainer.recipe.tensors(groups))


def assert_equal(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> None:
    (our_loss, our_gradient), (their_loss, their_gradient) = ours, theirs
    assert their_gradient.abs().max() > 1e-4, "the comparison must compare something"
    assert our_loss == pytest.approx(their_loss, abs=TOLERANCE, rel=TOLERANCE)
    scale = max(1.0, their_gradient.abs().max().item())
    torch.testing.assert_close(our_gradient / scale, their_gradient / scale, atol=TOLERANCE, rtol=0)


def assert_equal_whole_and_cut(
    ours: SlipstreamTrainer, groups: list[RolloutGroup], expected: tuple[float, torch.Tensor], *, is_tree: bool
) -> None:
    """Compare loss and gradient of the groups in one micro-batch, and in several."""
    for max_tokens, cut in ((1000, False), (16, True)):
        ours.recipe = dataclasses.replace(ours.recipe, max_tokens=max_tokens, tree=is_tree)
        batches = ours.recipe.tensors(groups)
        assert (len(batches) > 1) == cut
        assert_equal(loss_and_gradients(ours, batches), expected)


VARIATIONS: list[dict[str, Any]] = [
    {},
    {"importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": False},
    {"importance_sampling_level": "sequence"},
    {"beta": 0.1, "use_bias_correction_kl": False},
    {"off_policy_mask_threshold": 0.5},
    {"top_entropy_quantile": 0.25},  # the first tokens of a group have one entropy; the cut is not among them
    {"mask_truncated_completions": True},
    {"temperature": 0.7, "beta": 0.1, "use_bias_correction_kl": False, "delta": 1.5, "epsilon_high": 0.28},
    {"scale_rewards": "none", "entropy_coef": 0.05},
]


FIRST, LATER = VARIATIONS[:2], VARIATIONS[2:]


@pytest.fixture(
    scope="module",
    params=[*FIRST, *(pytest.param(options, marks=pytest.mark.long) for options in LATER)],
    ids=[",".join(options) or "plain" for options in VARIATIONS],
)
def trainers(
    request: pytest.FixtureRequest, one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SlipstreamTrainer, GRPOTrainer]:
    """Ours and TRL's of one variation; the loss type is an attribute that both only look at in the loss."""
    options = dict(request.param)
    config = run_config(
        tmp_path_factory.mktemp("run"),
        one_layer_model,
        sampling={"temperature": options.pop("temperature", 1.0)},
        trainer=options,
        correction={"ratio_max": 1.5},
    )
    return slipstream_trainer(config, one_layer_model), trl_trainer(config, one_layer_model)


@pytest.mark.long
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_update_per_batch_in_any_number_of_micro_batches(
    trainers: tuple[SlipstreamTrainer, GRPOTrainer], monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    """TRL has all rows in one."""
    ours, theirs = trainers
    ours.args.loss_type = theirs.loss_type = loss_type
    groups = off_policy(ours, some_groups())
    inputs = trl_inputs(theirs, groups)
    theirs._metrics["train"].clear()
    expected = loss_and_gradients(theirs, inputs)
    metrics = {name: values[-1] for name, values in theirs._metrics["train"].items()}
    if ours.args.mask_truncated_completions:
        metrics.pop("vespo/phi_seq_mean", None)  # of all completions, also those that we leave out
    for max_tokens, cut in ((1000, False), (16, True)):
        monkeypatch.setattr(ours, "recipe", dataclasses.replace(ours.recipe, max_tokens=max_tokens))
        batches = our_inputs(ours, groups)
        assert (len(batches) > 1) == cut
        assert_equal(loss_and_gradients(ours, batches), expected)
        assert {name: metrics_of(ours)[name] for name in metrics} == pytest.approx(metrics, rel=1e-6)
    ratio = metrics_of(ours)["sampling/importance_sampling_ratio/clipped_share"]
    assert 0 < ratio < 1, "some ratios must be cut and some not"


@pytest.mark.long
def test_a_step_that_trains_all_weights(trainers: tuple[SlipstreamTrainer, GRPOTrainer]) -> None:
    """The base with its embeddings, which are the head's weights too, beside the adapter."""
    ours, theirs = trainers
    for trainer in trainers:
        trainer.model.requires_grad_(True)
    assert ours.base.get_output_embeddings().weight is ours.base.get_input_embeddings().weight
    try:
        groups = off_policy(ours, some_groups())
        expected = loss_and_gradients(theirs, trl_inputs(theirs, groups))
        assert len(expected[1]) == sum(parameter.numel() for parameter in ours.model.parameters())
        for max_tokens in (1000, 16):
            batches = ours._prepare_inputs(dataclasses.replace(ours.recipe, max_tokens=max_tokens).tensors(groups))
            assert_equal(loss_and_gradients(ours, batches), expected)
    finally:
        for trainer in trainers:
            for name, parameter in trainer.model.named_parameters():
                parameter.requires_grad_("lora_" in name)


@pytest.mark.long
@pytest.mark.parametrize("target", [0.1, 9.0])
def test_the_entropy_bonus_adapts_to_the_steps_before(tmp_path: Path, one_layer_model: Path, target: float) -> None:
    """The model's entropy is above the one target and below the other."""
    ours, theirs = pair(
        tmp_path, one_layer_model, use_adaptive_entropy=True, entropy_coef=0.05, entropy_target=target, loss_type="grpo"
    )
    ours.recipe = dataclasses.replace(ours.recipe, max_tokens=16)
    groups = off_policy(ours, some_groups())
    batches, inputs = our_inputs(ours, groups), trl_inputs(theirs, groups)
    for _ in range(3):
        assert_equal(loss_and_gradients(ours, batches), loss_and_gradients(theirs, inputs))
        assert ours._entropy_bonus.coef == theirs.entropy_coef
        assert ours._entropy_bonus._last_entropy == pytest.approx(theirs._last_world_entropy, rel=1e-6)
        theirs.accelerator.gradient_state._set_sync_gradients(True)
    assert (ours._entropy_bonus.coef > 0.05) == (target > 1)


def with_tool_results(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Two or three of the middle tokens of the longer completions are those of a tool, in the second group one at the start."""
    result = []
    for index, group in enumerate(groups):
        sampled = np.ones(group.num_tokens, np.bool_)
        for tokens in group.records:
            if (length := tokens.stop - tokens.start) > 3:
                sampled[tokens.start + 1 : tokens.start + length - 1] = False
            elif index and length > 1:
                sampled[tokens.start] = False
        result.append(dataclasses.replace(group, sampled=sampled))
    return result


def test_tool_results_are_attended_to_and_not_in_the_loss(
    trainers: tuple[SlipstreamTrainer, GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = trainers
    ours.args.loss_type = theirs.loss_type = "dapo"
    groups = off_policy(ours, with_tool_results(some_groups()))
    expected = loss_and_gradients(theirs, trl_inputs(theirs, groups))
    for max_tokens, cut in ((1000, False), (16, True)):
        monkeypatch.setattr(ours, "recipe", dataclasses.replace(ours.recipe, max_tokens=max_tokens))
        batches = our_inputs(ours, groups)
        assert (len(batches) > 1) == cut
        assert_equal(loss_and_gradients(ours, batches), expected)


KEPT = ("old_per_token_logps", "completion_mask")
SEQUENCE_AND_KL = {"beta": 0.1, "importance_sampling_level": "sequence", "use_bias_correction_kl": False}


@pytest.fixture(scope="module", params=[{}, SEQUENCE_AND_KL], ids=["token", "kl"])
def trainers_of_two_updates(
    request: pytest.FixtureRequest, one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SlipstreamTrainer, GRPOTrainer]:
    return pair(tmp_path_factory.mktemp("two"), one_layer_model, num_iterations=2, **request.param)


@pytest.mark.long
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_second_of_two_updates_per_batch(
    trainers_of_two_updates: tuple[SlipstreamTrainer, GRPOTrainer], loss_type: str
) -> None:
    """The proximal policy is the one at the cut: its log-probs are kept while the weights move."""
    ours, theirs = trainers_of_two_updates
    ours.args.loss_type = theirs.loss_type = loss_type
    for trainer in (ours, theirs):
        set_weights(trainer)
    groups = off_policy(ours, some_groups())
    batches = ours.recipe.tensors(groups)
    first = ours._prepare_inputs(batches)
    reference = trl_inputs(theirs, groups)
    assert_equal(loss_and_gradients(ours, first), loss_and_gradients(theirs, reference))
    for trainer in (ours, theirs):
        perturb(trainer, seed=4)
    second = ours._prepare_inputs(batches)
    ours_moved, theirs_moved = loss_and_gradients(ours, second), loss_and_gradients(theirs, reference)
    assert_equal(ours_moved, theirs_moved)
    kept = [row[mask.bool()] for batch in second for row, mask in zip(*map(batch.get, KEPT), strict=True)]
    wanted = [row[mask.bool()] for row, mask in zip(*map(reference.get, KEPT), strict=True)]

    def by_size(row: torch.Tensor) -> list[float]:
        return row.tolist()

    torch.testing.assert_close(sorted(kept, key=by_size), sorted(wanted, key=by_size), atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def plain(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SlipstreamTrainer, GRPOTrainer]:
    return pair(tmp_path_factory.mktemp("plain"), one_layer_model)


@pytest.fixture(scope="module")
def uncorrected(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """TRL's, without an importance ratio."""
    return trl_trainer(
        run_config(tmp_path_factory.mktemp("uncorrected"), one_layer_model), one_layer_model, correction=False
    )


@pytest.mark.long
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tool_results_under_every_loss_type(
    plain: tuple[SlipstreamTrainer, GRPOTrainer], monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    ours, theirs = plain
    monkeypatch.setattr(ours, "recipe", dataclasses.replace(ours.recipe, max_tokens=16))
    ours.args.loss_type = theirs.loss_type = loss_type
    groups = off_policy(ours, with_tool_results(some_groups()))
    expected = loss_and_gradients(theirs, trl_inputs(theirs, groups))
    assert_equal(loss_and_gradients(ours, our_inputs(ours, groups)), expected)


@pytest.mark.parametrize(
    ("preset", "loss_type"),
    [
        (preset, loss_type)
        for preset in ("token_mask", "sequence_truncate", "sequence_mask")  # token_truncate is the default
        for loss_type in LOSS_TYPES
        if not (loss_type == "vespo" and preset.startswith("sequence"))  # refused, as TRL does
    ],
)
def test_presets_that_trl_has_too(
    plain: tuple[SlipstreamTrainer, GRPOTrainer], monkeypatch: pytest.MonkeyPatch, preset: str, loss_type: str
) -> None:
    ours, theirs = plain
    ours.args.loss_type = theirs.loss_type = loss_type
    low, high = (0.2, 3.0) if loss_type == "vespo" else (0.7, 1.6)  # under VESPO a masked token masks its completion
    correction = dataclasses.replace(PRESETS[preset], ratio_min=low, ratio_max=high)
    monkeypatch.setattr(ours, "_correction", correction)
    correct_as(theirs, correction)
    groups = off_policy(ours, some_groups())
    assert_equal(
        loss_and_gradients(ours, our_inputs(ours, groups)), loss_and_gradients(theirs, trl_inputs(theirs, groups))
    )
    clipped = metrics_of(ours)["sampling/importance_sampling_ratio/clipped_share"]
    assert 0 < clipped < 1, "some ratios must be out of bounds and some not"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_the_ratio_is_one_and_the_loss_is_plain_trl(
    plain: tuple[SlipstreamTrainer, GRPOTrainer], uncorrected: GRPOTrainer, loss_type: str
) -> None:
    ours, _ = plain
    ours.args.loss_type = uncorrected.loss_type = loss_type
    groups = on_policy(ours, some_groups())
    inputs = our_inputs(ours, groups)
    loss, gradient = loss_and_gradients(ours, inputs)
    for bound in ("min", "max"):
        ratio = metrics_of(ours)[f"sampling/importance_sampling_ratio/corrected/{bound}"]
        assert ratio == pytest.approx(1, abs=TOLERANCE)
    without = trl_inputs(uncorrected, groups)
    assert "importance_sampling_ratio" not in without
    assert_equal((loss, gradient), loss_and_gradients(uncorrected, without))


def test_correction_none_leaves_the_ratio_out(tmp_path: Path, one_layer_model: Path, uncorrected: GRPOTrainer) -> None:
    config = run_config(tmp_path, one_layer_model, correction={"preset": "none"})
    ours = slipstream_trainer(config, one_layer_model)
    uncorrected.loss_type = ours.args.loss_type
    groups = off_policy(ours, some_groups())
    without = trl_inputs(uncorrected, groups)
    assert_equal(loss_and_gradients(ours, our_inputs(ours, groups)), loss_and_gradients(uncorrected, without))


def test_every_loss_type_of_trl_is_compared() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    named = set()
    for one, several in re.findall(r'self\.loss_type (?:== "(\w+)"|in \[([^\]]+)\])', source):
        named |= {one} - {""} | set(re.findall(r'"(\w+)"', several))
    assert named == set(LOSS_TYPES)
