"""What the configuration makes of TRL's arguments, and the seams of the trainer that the loss does not show."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from transformers import AutoConfig

from consumer.learn.micro_batches import MicroBatch
from consumer.learn.options import GRPOConfig, build_arguments, build_lora, check_model
from consumer.learn.trainer import SlipstreamTrainer
from protocol.errors import ConfigError
from replay.batch_selection import TrainingBatch
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import loss_and_gradients, metrics_of, slipstream_trainer


def arguments(tmp_path: Path, *, num_prompts: int = 100, pipeline: Any = None, **options: Any) -> GRPOConfig:
    config = run_config(tmp_path, trainer=options, pipeline=pipeline or {"groups_per_step": 2})
    return build_arguments(config, on_gpu=False, num_prompts=num_prompts)


def refused(tmp_path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        arguments(tmp_path, **options)
    return str(caught.value)


# Arguments.


@pytest.mark.parametrize(
    ("options", "num_prompts", "steps"),
    [
        ({}, 100, 50),  # one epoch, two groups a step
        ({"num_train_epochs": 3}, 100, 150),
        ({"num_train_epochs": 0.5}, 100, 25),
        ({"num_train_epochs": 1}, 101, 50),  # what does not fill a step is left
        ({}, 1, 1),
        ({"num_iterations": 3}, 100, 150),  # every batch is trained three times
        ({"max_steps": 7, "num_train_epochs": 3}, 100, 7),
        ({"max_steps": -1, "num_train_epochs": 2}, 100, 100),
    ],
)
def test_the_number_of_steps(tmp_path: Path, options: dict[str, Any], num_prompts: int, steps: int) -> None:
    assert arguments(tmp_path, num_prompts=num_prompts, **options).max_steps == steps


def test_what_follows_from_our_sections(tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        seed=7,
        sampling={"num_generations": 4, "max_completion_length": 9, "temperature": 0.7},
        pipeline={"groups_per_step": 6},
    )
    result = build_arguments(config, on_gpu=False, num_prompts=100)
    assert (result.num_generations, result.max_completion_length, result.temperature) == (4, 9, 0.7)
    assert (result.per_device_train_batch_size, result.gradient_accumulation_steps) == (24, 1)
    assert result.steps_per_generation == 1
    assert result.seed == 7
    assert Path(result.output_dir) == tmp_path / "checkpoints"
    assert result.model_init_kwargs == {"dtype": "float32"}
    assert not result.use_vllm
    assert result.report_to == []
    assert (result.save_steps, result.num_train_epochs, result.logging_steps) == (50, 1, 1)


def test_options_of_the_user_reach_trl(tmp_path: Path) -> None:
    result = arguments(
        tmp_path,
        learning_rate="3e-5",  # YAML reads this as a string
        beta=0.04,
        loss_type="cispo",
        lr_scheduler_type="cosine",
        model_init_kwargs={"attn_implementation": "eager"},
    )
    assert (result.learning_rate, result.beta, result.loss_type) == (3e-5, 0.04, "cispo")
    assert result.lr_scheduler_type == "cosine"
    assert result.model_init_kwargs == {"dtype": "float32", "attn_implementation": "eager"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rat": 1e-5}, "trainer.learning_rat: unknown to trl.GRPOConfig; did you mean `learning_rate`?"),
        ({"learning_rate": "fast"}, "trainer.learning_rate: expected a number"),
        ({"max_steps": "many"}, "trainer.max_steps: expected a whole number"),
        ({"num_train_epochs": "two"}, "trainer.num_train_epochs: expected a number"),
        ({"model_init_kwargs": "eager"}, "trainer.model_init_kwargs: expected a mapping (got 'eager')"),
        ({"loss_type": "ppo"}, "trainer.loss_type: expected `grpo`, `dr_grpo`, `dapo`"),
        ({"importance_sampling_level": "turn"}, "trainer.importance_sampling_level: expected `token` or `sequence`"),
        (
            {"scale_rewards": "epoch"},
            "trainer.scale_rewards: expected `group`, `batch` or `none`",
        ),
        ({"optim": "sgdd"}, "trainer.optim: expected `adamw_torch`"),
    ],
)
def test_what_trl_does_not_know_or_refuses(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, **options)


@pytest.mark.parametrize("preset", ["sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"])
def test_vespo_takes_no_ratio_of_completions(tmp_path: Path, preset: str) -> None:
    config = run_config(tmp_path, trainer={"loss_type": "vespo"}, correction={"preset": preset})
    with pytest.raises(ConfigError, match=f"correction.preset: {preset} has one ratio per completion.*use token_trunc"):
        build_arguments(config, on_gpu=False, num_prompts=8)


@pytest.mark.parametrize(
    ("correction", "bounds"),
    [
        ({"ratio_max": 0.2}, "0 to 0.2"),  # meant as PPO's epsilon
        ({"preset": "icepop", "ratio_max": 0.4}, "0.5 to 0.4"),
        ({"preset": "geometric_mask", "ratio_min": 1.05}, "1.05 to 1.1"),
    ],
)
def test_bounds_that_leave_no_room_for_on_policy_tokens_are_refused(
    tmp_path: Path, correction: dict[str, Any], bounds: str
) -> None:
    with pytest.raises(ConfigError, match=f"correction: ratios from {bounds} leave out 1"):
        build_arguments(run_config(tmp_path, correction=correction), on_gpu=False, num_prompts=8)


def test_trl_cannot_cast_a_head_that_has_the_weights_of_the_embeddings(tmp_path: Path, tiny_model: Path) -> None:
    cast, model = arguments(tmp_path, cast_lm_head_to_fp32=True), AutoConfig.from_pretrained(tiny_model)
    with pytest.raises(
        ConfigError, match=r"trainer.cast_lm_head_to_fp32: the head .* TRL cannot cast those under LoRA"
    ):
        check_model(cast, model)
    check_model(arguments(tmp_path), model)
    model.tie_word_embeddings = False
    check_model(cast, model)


def test_several_trainer_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    monkeypatch.setattr(
        "consumer.learn.options.build", lambda *_, **__: GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    )
    with pytest.raises(ConfigError, match="one trainer process per run"):
        build_arguments(run_config(tmp_path), on_gpu=False, num_prompts=2)


def test_lora_is_built_by_peft(tmp_path: Path) -> None:
    lora = build_lora(run_config(tmp_path, lora={"r": 8, "target_modules": ["q_proj"], "lora_dropout": 0.1}))
    assert (lora.r, lora.lora_dropout, lora.target_modules) == (8, 0.1, {"q_proj"})
    assert lora.task_type == "CAUSAL_LM"
    with pytest.raises(ConfigError, match=r"lora.lora_alfa: unknown to peft.LoraConfig; did you mean `lora_alpha`"):
        build_lora(run_config(tmp_path, lora={"lora_alfa": 1}))


# The trainer.


def logprobs_of(trainer: SlipstreamTrainer, batch: MicroBatch) -> torch.Tensor:
    with torch.no_grad():
        return trainer.forward_pass(batch).logprobs


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 2),  # two batches, each in its own loss
        ({"beta": 0.1}, 4),  # and the reference, once per batch
        ({"num_iterations": 2}, 6),  # p once per batch, and two losses
        ({"num_iterations": 2, "beta": 0.1}, 8),
    ],
)
def test_forward_passes(tmp_path: Path, tiny_model: Path, options: dict[str, Any], passes: int) -> None:
    config = run_config(tmp_path, tiny_model, trainer=options, correction={"preset": "icepop", "token_veto": 1e-4})
    trainer = slipstream_trainer(config, tiny_model)
    groups = [rollout_group([[3], [4], [5], [6]]), rollout_group([[7], [8], [9], [3]])]
    iterations = options.get("num_iterations", 1)
    trainer._batches = [
        TrainingBatch(n * iterations + 1, iterations, (n + 1) * iterations, groups, 2) for n in range(2)
    ]
    with patch.object(trainer, "forward_pass", wraps=trainer.forward_pass) as forward:
        for batch in trainer.get_train_dataloader():
            loss_and_gradients(trainer, trainer._prepare_inputs(batch))
    assert forward.call_count == passes


@pytest.mark.long
def test_statistics_of_the_ratio_are_metrics_of_the_step(tmp_path: Path, tiny_model: Path) -> None:
    correction = {"preset": "geometric_mask", "token_veto": 1e-4, "probability_difference_max": 0.3}
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model, correction=correction), tiny_model)
    trainer._batches = [TrainingBatch(1, 1, 1, [rollout_group([[3, 4]] * 4), rollout_group([[5]] * 4)], 2)]
    [batch] = trainer.get_train_dataloader()
    loss_and_gradients(trainer, trainer._prepare_inputs(batch))
    prefix = "sampling/importance_sampling_ratio/"
    names = {name.removeprefix(prefix) for name in metrics_of(trainer) if name.startswith(prefix)}
    distribution = {"mean", "min", "max", "p01", "p50", "p99", "effective_sample_share", "chi_square"}
    assert names == {
        *distribution,
        *(f"geometric/{name}" for name in distribution),
        *(f"corrected/{name}" for name in distribution),
        "corrected/masked_share",
        "kl",
        "kl_k3",
        "clipped_share",
        "unscored_share",
        "vetoed_share",
        "moved_share",
    }


@pytest.mark.long
def test_log_probs_outside_the_loss_record_nothing(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model, trainer={"beta": 0.1}), tiny_model)
    [batch] = trainer.recipe.tensors([rollout_group([[3, 4]] * 4), rollout_group([[5]] * 4)])
    [inputs] = trainer._prepare_inputs([batch])
    assert trainer.last is None
    assert not inputs["ref_per_token_logps"].requires_grad
    loss_and_gradients(trainer, [inputs])
    assert metrics_of(trainer)["sampling/importance_sampling_ratio/mean"] > 0
    assert metrics_of(trainer)["kl"] > 0


@pytest.mark.long
def test_base_weights_in_bfloat16_and_lora_weights_in_float32(tmp_path: Path, tiny_model: Path) -> None:
    """As engine and trainer agree on. Against float32, log-probs move by no more than what eight bits of mantissa cost."""
    groups, logprobs = [rollout_group([[3, 4], [5], [6, 7], [8]]) for _ in range(2)], []
    for dtype in ("float32", "bfloat16"):
        config = run_config(tmp_path, tiny_model)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        trainer = slipstream_trainer(config, tiny_model)
        kinds = {(parameter.requires_grad, parameter.dtype) for parameter in trainer.model.parameters()}
        assert kinds == {(True, torch.float32), (False, getattr(torch, dtype))}
        [batch] = trainer._prepare_inputs(trainer.recipe.tensors(groups))
        assert loss_and_gradients(trainer, [batch])[1].dtype == torch.float32
        logprobs.append(logprobs_of(trainer, batch))
    assert logprobs[1].dtype == torch.float32
    assert 1e-4 < (logprobs[1] - logprobs[0]).abs().max() < 0.2


def test_batches_are_repeated_for_every_iteration_that_is_left_and_cut(tmp_path: Path, tiny_model: Path) -> None:
    config = run_config(
        tmp_path, tiny_model, pipeline={"trainer_tokens_per_micro_batch": 6}, trainer={"num_iterations": 2}
    )
    trainer = slipstream_trainer(config, tiny_model)
    first, second = ([rollout_group([[n], [n], [n], [n]]) for n in pair] for pair in ((3, 4), (5, 6)))
    begun_before, whole = TrainingBatch(1, 1, 2, first, len(first)), TrainingBatch(3, 2, 4, second, len(second))
    trainer._batches = [begun_before, whole]
    seen = [[batch["completion_ids"][:, 0].tolist() for batch in batches] for batches in trainer.get_train_dataloader()]
    assert seen == [[[3] * 4, [4] * 4], *[[[5] * 4, [6] * 4]] * 2], "a prompt of 2 tokens and 4 of completions"


@pytest.mark.long
def test_completions_are_logged_as_trl_does(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(tmp_path, tiny_model, trainer={"log_completions": True})
    trainer = slipstream_trainer(config, tiny_model)
    groups = [rollout_group([[3], [4, 5], [6], [7]], prompt=[8]), rollout_group([[9]] * 4, prompt=[8, 8])]
    trainer._batches = [TrainingBatch(1, 1, 1, groups, len(groups))]
    next(iter(trainer.get_train_dataloader()))
    trainer.log({"loss": 0.0})
    table = pd.read_parquet(tmp_path / "checkpoints" / "completions" / "completions_00000.parquet")
    decode = trainer.processing_class.decode
    assert table["prompt"].tolist() == [decode([8])] * 4 + [decode([8, 8])] * 4
    assert table["completion"].tolist() == [decode(ids) for ids in ([3], [4, 5], [6], [7], *[[9]] * 4)]
    assert table["first"].tolist() == [0.0, 1.0, 2.0, 3.0] * 2
    assert table["advantage"].tolist() == pytest.approx([-1.1618, -0.3873, 0.3873, 1.1618] * 2, abs=1e-3)


def test_metrics_reach_trl_under_the_names_of_the_reward_functions(tmp_path: Path, tiny_model: Path) -> None:
    functions = [{"function": "r:exact", "weight": 1.0}, {"function": "some/file.py:style", "weight": 0.1}]
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model, rewards={"functions": functions}), tiny_model)
    assert list(trainer.reward_names) == ["exact", "style"]
    assert trainer.recipe.rewards.weights.tolist() == pytest.approx([1.0, 0.1])
    trainer.add_to_log({"reward": 1.0, "reward_std": math.nan})
    trainer.add_to_log({"reward": 3.0})
    logs: dict[str, float] = {}
    trainer.log(logs)
    assert (logs["reward"], logs["reward_std"]) == (2.0, None)


def test_numbers_that_nothing_logs_do_not_pile_up(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model, trainer={"logging_strategy": "no"}), tiny_model)
    for _ in range(3):
        trainer.add_to_log({"reward": 1.0})
    assert len(trainer._unlogged) == 1
    trainer.log({})
    assert not trainer._unlogged


@pytest.mark.long
def test_checkpoints_are_written_to_staging_and_handed_over(tmp_path: Path, tiny_model: Path) -> None:
    trainer = slipstream_trainer(run_config(tmp_path, tiny_model), tiny_model)
    handed_over: list[tuple[int, Path]] = []

    def commit(step: int, staged: Path, write: Callable[[], None]) -> None:
        assert not staged.exists()
        write()
        handed_over.append((step, staged))

    trainer._commit_checkpoint = commit
    trainer.create_optimizer_and_scheduler(4)
    trainer.state.global_step = 3
    trainer._save_checkpoint(trainer.model, trial=None)
    [(step, staged)] = handed_over
    assert step == 3
    assert staged == tmp_path / "checkpoints" / ".partial" / "checkpoint-3"
    for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        assert (staged / name).stat().st_size > 0


def test_transformers_deletes_no_checkpoints(tmp_path: Path, tiny_model: Path) -> None:
    config = run_config(tmp_path, tiny_model, trainer={"save_total_limit": 1})
    assert slipstream_trainer(config, tiny_model).args.save_total_limit is None
