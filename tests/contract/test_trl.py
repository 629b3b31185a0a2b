"""TRL 1.16.0 and transformers: everything that consumer/learn takes for granted about them.

When one of them is upgraded and a test fails, read consumer/learn/trainer.py with the new source beside it before changing
the test; tests/unit/consumer/learn/test_loss_parity.py then tells whether the arithmetic still agrees.
"""

import ast
import dataclasses
import hashlib
import importlib.metadata
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames

from consumer.learn.forward import ChunkedLogProbFunction
from consumer.learn.options import GRPOConfig, build_arguments, build_lora, former_names
from consumer.learn.row_passes import add_fused_lm_head
from consumer.learn.trainer import SlipstreamTrainer
from producer.rewards.contract import TrainerState
from protocol.config import trainer_keys
from protocol.config.functions import REWARD_ARGUMENTS
from protocol.config.library_section import PEFT_DEFAULTS
from replay.batch_selection import TrainingBatch
from tests.integration.models import build_model
from tests.unit.consumer.builders import rollout_group, run_config
from tests.unit.consumer.trl_reference import GRPOTrainer

PINNED = "1.16.0"
LATER_KEYS = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # of transformers 5.23
LOSS_DIGEST = "28c82e8fd058351ca70070eeacadd3c78f641d7a05e48816fd6a02e1fb011da9"


def source(function: Callable[..., Any]) -> str:
    """Without comments and docstrings, in a uniform layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    [definition] = tree.body
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    return ast.unparse(tree)


LINES: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    # A batch may be a list of micro-batches: what runs around compute_loss looks for keys in it, finds none, and goes on.
    (
        Trainer.training_step,
        (
            "inputs = self._prepare_inputs(inputs)",
            "loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)",
            "self.accelerator.backward(loss, **kwargs)",
            "return loss.detach()",
        ),
    ),
    # The model goes to its device there, whole with its adapter, and only there.
    (Trainer.__init__, ("self._move_model_to_device(model, args.device)",)),
    (Trainer.autocast_smart_context_manager, ("return contextlib.nullcontext()",)),
    # The correction beside vLLM is the one that the parity tests compare.
    (
        GRPOTrainer._generate_and_score_completions,
        (
            "per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask",
            "per_token_logps_diff = torch.nan_to_num(per_token_logps_diff, nan=0.0)",
            "vllm_importance_sampling_ratio = torch.exp(logps_diff)",
        ),
    ),
    # What TRL's LM head, which models have that are not plain, is given, and how its answer is aligned with the labels.
    (
        GRPOTrainer._get_per_token_logps_and_entropies,
        (
            'model_inputs["output_router_logits"] = True',
            "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)",
            "all_logps.append(outputs.log_probs[:, -logits_to_keep:])",
            "all_entropies.append(outputs.entropy[:, -logits_to_keep:])",
        ),
    ),
    # Trackers take no NaN.
    (GRPOTrainer.log, ("metrics[key] = sum(valid) / len(valid) if valid else None",)),
    # The model is prepared as by its constructor.
    (
        GRPOTrainer.__init__,
        (
            "model = get_peft_model(model, peft_config, **get_peft_model_kwargs)",
            "model.enable_input_require_grads()",
            "disable_dropout_in_model(model)",
            "self._last_world_entropy = float('inf')",
        ),
    ),
    # A checkpoint is written into the output directory that we override.
    (
        Trainer._save_checkpoint,
        (
            'checkpoint_folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"',
            "run_dir = self._get_output_dir(trial=trial)",
            "output_dir = os.path.join(run_dir, checkpoint_folder)",
            "self._save_rng_state(output_dir)",
        ),
    ),
]
ORDERS: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    # The norm is asked for after the last backward pass and before the optimizer.
    (Trainer._run_epoch, ("self.training_step(", "self._get_grad_norm(", "self.optimizer.step()")),
    (Trainer.training_step, ("self.compute_loss(", "self.accelerator.backward(")),
    # Metrics are logged after the end of the step.
    (Trainer._run_epoch, ("on_step_begin", "training_step(", "on_step_end", "_maybe_log_save_evaluate")),
    # A checkpoint is whole before on_save.
    (Trainer._maybe_log_save_evaluate, ("self._save_checkpoint(", "on_save")),
    # Batches are fetched when they are trained: one fetched ahead would be settled in a checkpoint before its training.
    (Trainer.get_batch_samples, ("for _ in range(num_batches):", "next(epoch_iterator)")),
    # TRL itself refuses it with an adapter.
    (GRPOTrainer.__init__, ("You passed `sync_ref_model=True` while using a PEFT model",)),
]


@pytest.mark.parametrize(("function", "lines"), LINES, ids=lambda it: getattr(it, "__qualname__", ""))
def test_lines_that_we_rely_on(function: Callable[..., Any], lines: tuple[str, ...]) -> None:
    missing = [line for line in lines if ast.unparse(ast.parse(line)) not in source(function)]
    assert not missing, f"TRL changed {function.__qualname__}: consumer/learn/trainer.py needs {missing}"


@pytest.mark.parametrize(("function", "parts"), ORDERS, ids=lambda it: getattr(it, "__qualname__", ""))
def test_orders_that_we_rely_on(function: Callable[..., Any], parts: tuple[str, ...]) -> None:
    text = source(function)
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_what_else_the_loss_relies_on() -> None:
    assert source(Trainer.compute_loss_context_manager).count("autocast_smart_context_manager") == 1
    assert source(Trainer._run_epoch).count("self.get_batch_samples(") == 1
    assert transformers.trainer_utils.PREFIX_CHECKPOINT_DIR == "checkpoint"
    kernel = "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
    assert " ".join(inspect.signature(ChunkedLogProbFunction.forward).parameters) == kernel


def test_the_pinned_release_is_installed() -> None:
    assert importlib.metadata.version("trl") == PINNED, f"these tests and consumer/learn were written for {PINNED}"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        ("get_train_dataloader", ["self"]),
        ("_get_output_dir", ["self", "trial"]),
        ("create_optimizer", ["self", "model"]),
        ("_save", ["self", "output_dir", "state_dict"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("_save_optimizer_and_scheduler", ["self", "output_dir"]),
        ("_get_grad_norm", ["self", "model", "grad_norm"]),
        ("_load_rng_state", ["self", "checkpoint"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        ("_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        ("_generate", ["self", "prompts"]),  # replaced by the parity tests
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
    ],
)
def test_signatures(name: str, parameters: list[str]) -> None:
    """Those of transformers, which TRL overrides alike, and those that the parity tests replace."""
    method = getattr(GRPOTrainer, name, None)
    assert method is not None, f"GRPOTrainer.{name} is gone"
    actual = list(inspect.signature(method).parameters)
    assert actual[: len(parameters)] == parameters, f"GRPOTrainer.{name} takes other arguments now"


def test_we_override_the_seams_and_nothing_else() -> None:
    ours = {name for name, value in vars(SlipstreamTrainer).items() if not isinstance(value, (str, type(None), dict))}
    seams = {"__init__", "get_train_dataloader", "_prepare_inputs", "training_step", "compute_loss", "log"}
    seams |= {"_get_output_dir", "_save_checkpoint", "_get_grad_norm", "_move_model_to_device"}
    seams |= {"create_optimizer", "_save", "_save_optimizer_and_scheduler"}
    seams |= {"_load_from_checkpoint", "_load_optimizer_and_scheduler"}
    assert {name for name in ours if hasattr(Trainer, name)} == seams, (
        "a new override of transformers needs a contract test; a new name of it may have become an override by accident"
    )


def test_the_loss_that_ours_was_written_after() -> None:
    """When it changes, see what consumer/learn/loss.py has to follow; the parity tests tell of what they compare."""
    names = ("_compute_loss", "get_off_policy_mask", "get_gamma_weights")
    texts = [inspect.getsource(inspect.unwrap(getattr(GRPOTrainer, name))) for name in names]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest() == LOSS_DIGEST


def test_the_lm_head_that_trl_gives_to_models_that_are_not_plain() -> None:
    parameters = list(inspect.signature(add_fused_lm_head).parameters)
    assert parameters == ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]


def test_the_state_of_the_adaptive_entropy_bonus_is_kept_as_trl_does() -> None:
    assert "entropy_ctrl_state.json" in source(GRPOTrainer._load_optimizer_and_scheduler)
    assert "{'entropy_coef': self.entropy_coef, 'last_world_entropy': self._last_world_entropy}" in source(
        GRPOTrainer._save_checkpoint
    )


class Interrupted(Exception):
    """No more batches come."""


class Trainings:
    """Runs of four steps with dropout, over the same batches, that save after the second."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.checkpoint = folder / "checkpoint-2"

    def train(self, num_batches: int = 4, resume: bool = False) -> torch.Tensor:
        """The adapter after the batches up to this one, as one vector."""
        config = run_config(
            self.folder, self.model, lora={"lora_dropout": 0.5}, trainer={"max_steps": 4, "save_steps": 2}
        )
        trainer = SlipstreamTrainer(
            config,
            build_arguments(config, on_gpu=False, num_prompts=8),
            build_lora(config),
            self.model,
            self.batches(2 if resume else 0, num_batches),
            self.keep,
        )
        if resume:
            trainer._load_from_checkpoint(str(self.checkpoint))
        try:
            trainer.train(resume_from_checkpoint=str(self.checkpoint) if resume else None)
        except Interrupted:
            assert num_batches < 4
        weights = sorted((name, value) for name, value in trainer.model.named_parameters() if value.requires_grad)
        return torch.cat([value.detach().flatten() for _, value in weights])

    def batches(self, first: int, last: int) -> Iterator[TrainingBatch]:
        for number in range(first, last):
            groups = [rollout_group([[3 + number], [4, 5], [6], [7, number]]) for _ in range(2)]
            yield TrainingBatch(number + 1, 1, number + 1, groups, len(groups))
        raise Interrupted

    def keep(self, step: int, staged: Path, write: Callable[[], None]) -> None:
        write()
        if staged.name == self.checkpoint.name:
            staged.rename(self.checkpoint)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("resume")
    return Trainings(folder, build_model("qwen2", folder / "model"))


@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_random_numbers_of_its_checkpoint(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it skips no data (`ignore_data_skip`): those come from the journal."""
    whole = trainings.train()
    checkpoint = trainings.checkpoint.rename(trainings.folder / "of the whole run")
    interrupted = trainings.train(num_batches=2)
    names = sorted(file.name for file in checkpoint.iterdir())
    assert "rng_state.pth" in names
    assert sorted(file.name for file in trainings.checkpoint.iterdir()) == names
    torch.rand(7)
    assert torch.equal(trainings.train(resume=True), whole)
    assert not torch.equal(interrupted, whole)

    monkeypatch.setattr(Trainer, "_load_rng_state", lambda self, checkpoint: None)
    assert not torch.equal(trainings.train(resume=True), whole), "dropout makes these numbers matter"


def test_choices_that_trl_only_looks_at_in_the_middle_of_a_step() -> None:
    loss = source(GRPOTrainer._compute_loss)
    scoring = source(GRPOTrainer._generate_and_score_completions)
    with former_names():
        arguments = GRPOConfig("unused", use_cpu=True, bf16=False)
    for key, choices in trainer_keys.CHOICES.items():
        assert hasattr(arguments, key)
        text = loss if key in ("loss_type", "importance_sampling_level") else scoring
        for choice in choices:
            assert isinstance(choice, bool) or f"'{choice}'" in text, f"TRL no longer knows {key}={choice}"


def test_every_key_of_trl_was_looked_at() -> None:
    """A field that is new, or has another default, needs a place in protocol/config/trainer_keys.py."""
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(GRPOConfig)
        if field.init
    }
    working = {key for keys in trainer_keys.WORKS.values() for key in keys}
    placed = working | trainer_keys.RESERVED.keys() | trainer_keys.REFUSED.keys()
    assert placed - LATER_KEYS <= {name for name in defaults if not name.startswith("vllm_")} <= placed
    refused = trainer_keys.REFUSED.items()
    assert {key: refusal.default for key, refusal in refused} == {key: defaults[key] for key, _ in refused}
    shown = trainer_keys.TRL_DEFAULTS
    assert shown == {key: defaults[key] for key in shown}
    assert trainer_keys.DEFAULTS.keys() <= shown.keys() <= working


def test_defaults_of_adapters_that_a_check_shows_are_those_of_peft() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(LoraConfig)}
    assert {key: defaults[key] for key in PEFT_DEFAULTS} == PEFT_DEFAULTS


def test_values_that_are_refused_are_values_of_transformers() -> None:
    values = trainer_keys.REFUSED_VALUES
    assert set(values["optim"]) <= {member.value for member in OptimizerNames}
    in_backward = {member.value for member in OptimizerNames if "layerwise" in member.value or "lomo" in member.value}
    assert {name for name, reason in values["optim"].items() if reason == values["optim"]["lomo"]} == in_backward
    assert set(values["save_strategy"]) == {member.value for member in SaveStrategy} - {"no", "steps"}
    assert set(values["logging_strategy"]) == {member.value for member in IntervalStrategy} - {"no", "steps"}


def test_reward_functions_are_passed_what_the_contract_has() -> None:
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._calculate_rewards))
    passed = set(re.findall(r'(?<!row_)reward_kwargs\["(\w+)"\]', source)) | {
        "prompts",
        "completions",
        "completion_ids",
    }
    assert passed == {*REWARD_ARGUMENTS, "environments"}, (
        "an argument that reward functions of TRL get is passed or named in the docs"
    )
    assert 'key not in ["prompt", "completion", "completion_ids"]' in source
    assert set(TrainerState.__struct_fields__) <= {
        field.name for field in dataclasses.fields(transformers.TrainerState)
    }
