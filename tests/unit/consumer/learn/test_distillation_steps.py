"""Steps in which a teacher teaches: every cell of a micro-batch, loss and gradient against sums over tokens in float64, and a
task that rewards alone do not teach."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumer.learn.divergence import Teacher
from consumer.learn.forward import Head, Logits, check_teachable
from consumer.learn.importance import PRESETS, importance_factors
from consumer.learn.loss import Pass, part_of_loss, token_advantages
from consumer.learn.micro_batches import MicroBatch
from consumer.learn.options import build_arguments
from consumer.learn.trainer import SlipstreamTrainer
from protocol.errors import ConfigError
from protocol.wire.codec import encode
from replay.distillation import DistillationRecipe, teacher_advantages
from replay.groups import GroupShape, RolloutGroup, message_of
from replay.rewards import RewardRecipe
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.learn.test_batches import RECIPE, rows_in_order
from tests.unit.consumer.learn.test_loss_parity import (
    assert_equal,
    assert_equal_whole_and_cut,
    off_policy,
    some_groups,
    with_tool_results,
)
from tests.unit.consumer.trl_reference import (
    inputs_of_logprobs,
    lora_parameters,
    loss_and_gradients,
    loss_options,
    slipstream_trainer,
)

TOP = ("teacher_top_ids", "teacher_top_logprobs")
TEACHERS = [{"name": "big", "url": "http://127.0.0.1:8000"}]


def recipe(**options: Any) -> RewardRecipe:
    return RewardRecipe(np.ones(1, np.float32), distillation=DistillationRecipe(**options), scale_rewards="none")


TAUGHT = rollout_group(
    [[11, 12, 13], [14, 15, 16, 17], [18]],
    sampled=[[True, False, True], [False, False, True, True], [True]],
    episodes=[0, 0, 1],
    rewards=[0.0, 1.0],
    logprobs=[[-1.0, 0, -2.0], [0, 0, math.nan, -1.0], [-4.0]],
    teacher=[-0.5, 0, -2.0, 0, 0, -1.0, -1.75, -0.25],
)
BY_TEACHER = [[0.5, 0, 0, 0], [0, 0, 0, -0.75], [3.75, 0, 0, 0]]


def test_every_cell_of_a_batch() -> None:
    batch = rows_in_order([TAUGHT], rewards=recipe(coef=0.5))
    assert batch["teacher_advantages"].tolist() == BY_TEACHER
    assert batch["teacher_advantages"].dtype == torch.get_default_dtype()
    assert batch["advantages"].tolist() == [-0.5, -0.5, 0.5]
    both = token_advantages(batch, 0.5)
    torch.testing.assert_close(both, torch.tensor(BY_TEACHER) * 0.5 + batch["advantages"][:, None])
    alone = rows_in_order([TAUGHT], rewards=recipe(alone=True))
    assert alone["teacher_advantages"].tolist() == BY_TEACHER
    assert alone["advantages"].tolist() == [0, 0, 0]


NONE = (-1, 0.0)
TOPPED = dataclasses.replace(
    rollout_group(
        [[11, 12, 13], [14]], sampled=[[True, False, True], [True]], rewards=[1.0, 1.0],
        logprobs=[[-1.0, 0, -1.0], [-2.0]], teacher=[-1.0, 0, -1.0, -2.0],
        top=[[(20, -0.5), (11, -1.0)], [NONE, NONE], [(21, -1.25), NONE], [(22, -1.0), (23, -1.5)]],
    ),
)  # fmt: skip


def test_every_bucket_of_a_batch_whose_divergence_teaches() -> None:
    batch = rows_in_order([TOPPED], rewards=recipe(num_top=2), only_advantages=True)
    assert batch["completion_ids"].shape == (2, 3), "a row is trained although no advantage moves it"
    assert batch["teacher_ids"].tolist() == [
        [[11, 20, 11], [12, 12, 12], [13, 21, 13]],
        [[14, 22, 23], [0] * 3, [0] * 3],
    ]
    none = -math.inf
    assert batch["teacher_logprobs"].tolist() == [
        [[-1.0, -0.5, none], [0.0, none, none], [-1.0, -1.25, none]], [[-2.0, -1.0, -1.5], [0.0] * 3, [0.0] * 3]
    ]  # fmt: skip
    assert batch["num_items_in_batch"] == 3
    assert "teacher_ids" not in rows_in_order([TOPPED], rewards=recipe())


def test_a_row_is_trained_if_its_teacher_moves_a_token() -> None:
    even = rollout_group(
        [[11, 12], [13, 14]],
        rewards=[1.0, 1.0],
        logprobs=[[-1.0, -1.0], [-1.0, -1.0]],
        teacher=[-1.0, -2.0, -1.0, -1.0],
    )
    batch = rows_in_order([even], rewards=recipe(), only_advantages=True)
    assert batch["completion_ids"].tolist() == [[11, 12]], "about the other one they agree"
    assert batch["num_items_in_batch"] == 4


@pytest.mark.parametrize(("group", "k"), [(TAUGHT, 0), (TOPPED, 2)])
def test_a_group_from_a_journal_is_trained_bit_for_bit(group: RolloutGroup, k: int) -> None:
    shape = GroupShape(2, num_rewards=1, max_completion_length=6, vocab_size=64, has_teacher=True, teacher_top_k=k)
    again = shape.load(encode(message_of(group)))
    own = dataclasses.replace(RECIPE, rewards=dataclasses.replace(recipe(num_top=k), scale_rewards="group"))
    for one, other in zip(own.tensors([group]), own.tensors([again]), strict=True):
        assert {name: values.numpy().tobytes() for name, values in one.items()} == {
            name: values.numpy().tobytes() for name, values in other.items()
        }


def test_groups_of_one_completion_are_trained() -> None:
    one = rollout_group([[11, 12]], rewards=[1.0], logprobs=[[-1.0, -1.0]], teacher=[-0.5, -2.0])
    batch = rows_in_order([one, one], rewards=recipe(alone=True), num_generations=1, only_advantages=True)
    assert batch["teacher_advantages"].tolist() == [[0.5, -1.0]] * 2
    assert batch["advantages"].tolist() == [0, 0]


def test_trl_takes_the_step_for_a_group_where_groups_are_of_one_completion(tmp_path: Path) -> None:
    sections = {"distillation": {"mode": "advantage", "alone": True}, "sampling": {"num_generations": 1}}
    config = run_config(tmp_path, teachers=TEACHERS, pipeline={"groups_per_step": 3}, **sections)
    arguments = build_arguments(config, on_gpu=False, num_prompts=9)
    assert (arguments.per_device_train_batch_size, arguments.max_steps) == (3, 3)


def taught(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with log-probs of a teacher."""
    draw = np.random.default_rng(7)
    return [
        dataclasses.replace(
            group, teacher_logprobs=np.where(group.is_sampled, -draw.exponential(2, group.num_tokens), 0).astype("f4")
        )
        for group in groups
    ]


def with_top(groups: list[RolloutGroup], k: int, vocabulary: int = 49) -> list[RolloutGroup]:
    """The groups with a teacher's log-probs of all tokens, of which one has no other likely token that the policy has."""
    draw, result = np.random.default_rng(8), []
    for group in groups:
        own = np.log(draw.dirichlet(np.full(vocabulary, 0.3), group.num_tokens)).clip(-50)
        ids = np.argsort(-own)[:, :k]
        top, of_token = np.take_along_axis(own, ids, 1), own[np.arange(group.num_tokens), group.completion_ids]
        ids[-1], ids[~group.is_sampled] = -1, -1
        result.append(
            dataclasses.replace(
                group,
                teacher_logprobs=np.where(group.is_sampled, of_token, 0).astype("f4"),
                teacher_top_ids=ids.astype("i4"),
                teacher_top_logprobs=np.where(ids < 0, 0, top).astype("f4"),
            )
        )
    return result


def trainer_of(folder: Path, model: Path, **options: Any) -> SlipstreamTrainer:
    sections = {"teachers": TEACHERS, "distillation": {"mode": "advantage"} | options}
    trainer = {"loss_type": "dapo"}
    return slipstream_trainer(
        run_config(folder, model, trainer=trainer, correction={"ratio_max": 1.5}, **sections), model
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("is_tree", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_loss_and_gradient_are_sums_over_tokens(
    tmp_path: Path, one_layer_model: Path, is_tree: bool, alone: bool
) -> None:
    """Each row alone and unpadded: minus the mean over tokens of min(p / b, 1.5) (A_i + c (log p_T - log b)) π / p, in the first
    update, in which π = p and no ratio is clipped."""
    ours = trainer_of(tmp_path, one_layer_model, coef=0.5, alone=alone)
    assert ours.row_passes.kernel is not None
    ours.row_passes.kernel = ours.row_passes.kernel if is_tree else None
    groups = taught(off_policy(ours, with_tool_results(some_groups())))
    ours.model.zero_grad()
    num_tokens, total = sum(int(group.is_sampled.sum()) for group in groups), 0.0
    for group in groups:
        rewards = torch.tensor(group.rewards[:, 0])
        of_outcome = (rewards - rewards.mean()) / (rewards.std() + 1e-4) * (not alone)
        for index, tokens in enumerate(group.records):
            ids = torch.tensor([*group.prompt_ids.tolist(), *group.completion_ids[tokens].tolist()])
            logprobs = ours.model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
            own = logprobs.gather(1, ids[len(group.prompt_ids) :, None])[:, 0]
            for place, sampled in enumerate(group.is_sampled[tokens].tolist()):
                behaviour = float(group.logprobs[tokens][place])
                teacher = float(group.teacher_logprobs[tokens][place])  # type: ignore[index]
                ratio, by_teacher = 1.0, 0.0
                if not math.isnan(behaviour):
                    ratio, by_teacher = min(math.exp(own[place].item() - behaviour), 1.5), teacher - behaviour
                weight = sampled * ratio * (of_outcome[index].item() + 0.5 * by_teacher) / num_tokens
                (-weight * own[place]).backward(retain_graph=True)
                total -= weight
    gradient = torch.cat([parameter.grad.flatten() for parameter in lora_parameters(ours)])
    assert_equal_whole_and_cut(ours, groups, (total, gradient), is_tree=is_tree)
    gains = np.concatenate([teacher_advantages(group)[group.is_sampled] for group in groups])
    assert ours.last is not None
    assert ours.last.metrics["distillation/logprob_gain"] == pytest.approx(gains.mean(), rel=1e-11)


def divergence_of_token(log_p: torch.Tensor, group: RolloutGroup, token: int, beta: float) -> torch.Tensor:
    """Of a teacher's buckets, from the log-probs of the whole vocabulary."""
    assert group.teacher_top_ids is not None
    assert group.teacher_top_logprobs is not None
    assert group.teacher_logprobs is not None
    known = dict(zip(group.teacher_top_ids[token].tolist(), group.teacher_top_logprobs[token].tolist(), strict=True))
    known |= {int(group.completion_ids[token]): float(group.teacher_logprobs[token])}
    known.pop(-1, None)
    s = log_p.exp()[list(known)]
    s, t = torch.cat([s, 1 - s.sum()[None]]), torch.tensor([*map(math.exp, known.values())])
    t = torch.cat([t, 1 - t.sum()[None]])
    m = beta * t + (1 - beta) * s
    return (beta * t * (t / m).log() + (1 - beta) * s * (s / m).log()).sum()


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("is_tree", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_loss_and_gradient_have_the_mean_divergence_of_the_tokens(
    tmp_path: Path, one_layer_model: Path, is_tree: bool, alone: bool
) -> None:
    """Each row alone and unpadded: c times the mean over tokens of min(p / b, 1.5) times the divergence, and the part of rewards
    as above."""
    options = {"mode": "divergence", "top_k": 3, "beta": 0.25, "coef": 0.5}
    ours = trainer_of(tmp_path, one_layer_model, alone=alone, **options)
    assert ours.row_passes.kernel is not None
    ours.row_passes.kernel = ours.row_passes.kernel if is_tree else None
    groups = with_top(off_policy(ours, with_tool_results(some_groups())), 3)
    ours.model.zero_grad()
    num_tokens, total, divergences = sum(int(group.is_sampled.sum()) for group in groups), 0.0, list[float]()
    for group in groups:
        rewards = torch.tensor(group.rewards[:, 0])
        of_outcome = (rewards - rewards.mean()) / (rewards.std() + 1e-4) * (not alone)
        for index, tokens in enumerate(group.records):
            ids = torch.tensor([*group.prompt_ids.tolist(), *group.completion_ids[tokens].tolist()])
            logprobs = ours.model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
            for place in np.flatnonzero(group.is_sampled[tokens]).tolist():
                own = logprobs[place, ids[len(group.prompt_ids) + place]]
                divergence = divergence_of_token(logprobs[place], group, tokens.start + place, 0.25)
                ratio = min(math.exp(own.item() - float(group.logprobs[tokens.start + place])), 1.5)
                ratio = 1.0 if math.isnan(ratio) else ratio
                loss = ratio * (0.5 * divergence - of_outcome[index] * (own - own.detach()).exp()) / num_tokens
                loss.backward(retain_graph=True)
                total += loss.item()
                divergences.append(divergence.item())
    gradient = torch.cat([parameter.grad.flatten() for parameter in lora_parameters(ours)])
    assert_equal_whole_and_cut(ours, groups, (total, gradient), is_tree=is_tree)
    assert ours.last is not None
    assert ours.last.metrics["distillation/divergence"] == pytest.approx(np.mean(divergences), rel=1e-11)
    assert ours.last.metrics["distillation/logprob_gain"] != 0


def test_a_model_that_caps_its_logits_takes_no_divergence(tmp_path: Path) -> None:
    section = run_config(tmp_path, teachers=TEACHERS, distillation={"mode": "divergence"}).distillation
    for logits in (None, Logits(1.0, 30.0)):
        with pytest.raises(ConfigError, match=r"distillation\.mode"):
            check_teachable(section, logits)
    check_teachable(section, Logits(0.5))
    check_teachable(run_config(tmp_path).distillation, None)


@pytest.mark.usefixtures("float64")
def test_logits_may_have_a_factor() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=draw) for size in ((4, 3), (7, 3)))
    ids = torch.tensor([[0, 1, 2]] * 4)
    teacher = Teacher(ids, torch.tensor([[0.5, 0.25, 0.125]] * 4).log(), 0.5)
    options = loss_options(temperature=1.0)
    scaled = Head(Logits(0.25), options, entropy_trains=False)(hidden, weight, None, ids[:, 0], teacher)
    plain = Head(Logits(), options, entropy_trains=False)(hidden / 4, weight, None, ids[:, 0], teacher)
    torch.testing.assert_close(scaled, plain, atol=1e-14, rtol=0)


def each_alone(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """A group of each completion."""
    return [
        dataclasses.replace(
            group,
            completion_lengths=group.completion_lengths[number : number + 1],
            rewards=group.rewards[number : number + 1],
            truncated=group.truncated[number : number + 1],
            **{
                name: getattr(group, name)[tokens]
                for name in ("completion_ids", "logprobs", "sampled", "teacher_logprobs", *TOP)
            },
        )
        for group in groups
        for number, tokens in enumerate(group.records)
    ]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [("dapo", "advantage"), ("grpo", "advantage"), pytest.param("grpo", "divergence", marks=pytest.mark.long)],
)
def test_groups_of_one_completion_teach_what_these_completions_teach_in_larger_groups(
    tmp_path: Path, one_layer_model: Path, loss_type: str, mode: str
) -> None:
    found = []
    for count in (4, 1):
        sections = {"teachers": TEACHERS, "distillation": {"mode": mode, "alone": True}}
        sizes = {"sampling": {"num_generations": count}, "pipeline": {"groups_per_step": 8 // count}}
        config = run_config(tmp_path, one_layer_model, trainer={"loss_type": loss_type}, **sizes, **sections)
        ours = slipstream_trainer(config, one_layer_model)
        groups = with_top(off_policy(ours, with_tool_results(some_groups())), 16)
        groups = groups if count > 1 else each_alone(groups)
        found.append(loss_and_gradients(ours, ours.recipe.tensors(groups)))
    assert_equal(*found)


@pytest.mark.usefixtures("float64")
def test_the_ratio_of_the_teachers_part_is_not_clipped_and_its_factor_applies() -> None:
    batch: MicroBatch = {
        "completion_mask": torch.ones(1, 2),
        "advantages": torch.tensor([1.0]),
        "teacher_advantages": torch.tensor([[2.0, -1.0]]),
        "sampling_per_token_logps": torch.tensor([[-2.0, -1.0]]),
        "old_per_token_logps": torch.tensor([[-2.0 + math.log(1.25), -1.0]]),
        "num_items_in_batch": torch.tensor(2),
    }
    current = (batch["old_per_token_logps"] + math.log(2)).requires_grad_()  # π / p = 2, p / b is 1.25 and 1
    factors = importance_factors(
        PRESETS["token_truncate"], current=current, proximal=batch["old_per_token_logps"],
        behaviour=batch["sampling_per_token_logps"], advantages=token_advantages(batch, 0.5), mask=torch.ones(1, 2),
    )  # fmt: skip
    losses, _ = part_of_loss(
        loss_options(loss_type="dapo", beta=0.0),
        batch,
        Pass(current, torch.zeros(1, 2)),
        factors,
        teacher_coef=0.5,
    )
    losses.backward()
    clipped = -(1.2 * 1.25 + 1.2)  # PPO's bound; it has no gradient
    assert losses.item() == pytest.approx((clipped - 0.5 * 2 * 2.0 * 1.25 + 0.5 * 2 * 1.0) / 2, abs=1e-12)
    torch.testing.assert_close(current.grad, torch.tensor([[-0.5 * 2 * 2.0 * 1.25, 0.5 * 2 * 1.0]]) / 2)


PLACES, CHOICES, COMPLETIONS, STEPS = 6, 8, 4, 40
RIGHT = np.array([3, 1, 4, 1, 5, 2])


def chance_after_training(distillation: DistillationRecipe | None, count: int) -> float:
    """Return the probability to solve a task of six tokens that is rewarded if all are right, for a policy that is a table, after
    `STEPS` groups of `count` completions. The teacher says the right ones with probability 0.93."""
    rewards = RewardRecipe(np.ones(1, np.float32), distillation=distillation)
    own = dataclasses.replace(RECIPE, rewards=rewards, num_generations=count)
    table, draw = torch.zeros(PLACES, CHOICES, requires_grad=True), np.random.default_rng(0)
    optimizer = torch.optim.Adam([table], 0.2)
    teacher = np.where(np.arange(CHOICES) == RIGHT[:, None], 0.93, 0.01)
    for _ in range(STEPS):
        chances = table.detach().softmax(-1).double().numpy()
        said = np.stack([draw.choice(CHOICES, count, p=each / each.sum()) for each in chances], 1)
        places = np.arange(PLACES)
        group = rollout_group(
            said.tolist(),
            rewards=(said == RIGHT).all(1).astype(float).tolist(),
            logprobs=np.log(chances[places, said]).tolist(),
            teacher=np.log(teacher[places, said]).flatten().tolist(),
        )
        if rewards.signal(group) == 0.0:
            continue
        [batch] = own.tensors([group])
        logprobs = table.log_softmax(-1).expand(count, -1, -1).gather(2, batch["completion_ids"][..., None])[..., 0]
        factors = importance_factors(
            PRESETS["token_truncate"], current=logprobs, proximal=logprobs.detach(),
            behaviour=batch["sampling_per_token_logps"], advantages=batch["advantages"], mask=batch["completion_mask"],
        )  # fmt: skip
        options = loss_options(loss_type="dapo", beta=0.0, per_device_train_batch_size=count)
        coef = 1.0 if distillation else 0.0
        loss, _ = part_of_loss(options, batch, Pass(logprobs, torch.zeros_like(logprobs)), factors, teacher_coef=coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(table.detach().softmax(-1)[torch.arange(PLACES), torch.from_numpy(RIGHT)].prod())


@pytest.mark.long
def test_a_teacher_teaches_what_rewards_alone_do_not() -> None:
    assert chance_after_training(None, COMPLETIONS) == pytest.approx(CHOICES**-PLACES), (
        "no group of the budget was solved"
    )
    best = 0.93**PLACES
    assert chance_after_training(DistillationRecipe(), COMPLETIONS) > 0.5 * best
    assert chance_after_training(DistillationRecipe(alone=True), 1) > 0.5 * best, "one completion is enough"


def share_outside(folder: Path, model: Path, groups: list[RolloutGroup], **options: Any) -> float:
    """The share of tokens that DPPO's mask leaves out."""
    sections = {"teachers": TEACHERS, "distillation": {"mode": "divergence", "top_k": 3, **options}}
    config = run_config(
        folder, model, trainer={"loss_type": "dapo"}, correction={"probability_difference_max": 1e-9}, **sections
    )
    trainer = slipstream_trainer(config, model)
    loss_and_gradients(trainer, trainer._prepare_inputs(trainer.recipe.tensors(groups)))
    return trainer.end_passes()["sampling/importance_sampling_ratio/moved_share"]


@pytest.mark.usefixtures("float64")
def test_a_divergence_has_no_part_in_the_mask_of_dppo(tmp_path: Path, one_layer_model: Path) -> None:
    groups = with_top(off_policy(trainer_of(tmp_path, one_layer_model), some_groups()), 3)
    weak, strong = (share_outside(tmp_path, one_layer_model, groups, coef=coef) for coef in (1e-9, 1e3))
    assert weak == strong > 0
    assert share_outside(tmp_path, one_layer_model, groups, coef=1.0, alone=True) == 0


@pytest.mark.usefixtures("float64")
def test_a_row_whose_rewards_weigh_nothing_is_not_clipped() -> None:
    current = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    inputs = inputs_of_logprobs(
        current,
        torch.tensor([1.0, 1.0]),
        old_per_token_logps=current - 1,
        loss_weights=torch.tensor([[1.0] * 3, [0.0] * 3]),
    )
    mask = torch.ones(2, 2)
    factors = importance_factors(
        PRESETS["none"],
        current=current,
        proximal=current - 1,
        behaviour=current,
        advantages=inputs["advantages"],
        mask=mask,
    )
    for loss_type, name in (("dapo", "clip_ratio/high_mean"), ("cispo", "cispo_clip_ratio")):
        options = loss_options(loss_type=loss_type, beta=0.0, epsilon_high=0.2)
        _, seen = part_of_loss(options, inputs, Pass(current, mask), factors)
        assert seen[name].tolist() == [[True, True], [False, False]]
