"""The treatment of every key of `trl.GRPOConfig`, which includes `transformers.TrainingArguments`, in the `trainer` section.

Guarantee: a key is in one place only. Either it works as TRL documents it (`WORKS`), except for some values (`REFUSED_VALUES`),
or it follows from another key (`RESERVED`), or it may only have the value that changes nothing (`REFUSED`). A contract test
fails when the installed TRL or transformers has a field that is in none of them, or another default.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-4,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "report_to": "none",
    "save_steps": 50,
}
"""Of ours, where the file leaves a key out: TRL's are those of full fine-tuning, and its checkpoints 500 steps apart."""

TRL_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "num_train_epochs": 3.0,
    "logging_steps": 10,
    "report_to": "none",
    "save_steps": 500,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "loss_type": "dapo",
    "beta": 0.0,
    "epsilon": 0.2,
    "num_iterations": 1,
    "scale_rewards": "group",
    "mask_truncated_completions": False,
}
"""TRL's of the keys that decide what a run learns and costs."""


def defaults(lora: dict[str, Any] | None) -> dict[str, Any]:
    """Return ours. Without `lora` all weights train, at TRL's learning rate."""
    return DEFAULTS if lora is not None else DEFAULTS | {"learning_rate": TRL_DEFAULTS["learning_rate"]}


WORKS: dict[str, tuple[str, ...]] = {
    "Length of the run": ("num_train_epochs", "max_steps"),
    "Optimizer": (
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "max_grad_norm"),
        *("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"),
    ),
    "Loss": (
        *("loss_type", "beta", "epsilon", "epsilon_high", "delta", "num_iterations", "importance_sampling_level"),
        *("scale_rewards", "multi_objective_aggregation", "mask_truncated_completions", "off_policy_mask_threshold"),
        *("use_bias_correction_kl", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy"),
        *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        *("sapo_temperature_neg", "sapo_temperature_pos"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "router_aux_loss_coef"),
    ),
    "Model and memory": (
        *("model_init_kwargs", "disable_dropout", "cast_lm_head_to_fp32", "bf16", "fp16", "tf32"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_empty_cache_steps", "full_determinism"),
    ),
    "Logs and trackers": (
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_level"),
        *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("log_completions", "num_completions_to_print", "log_unique_prompts", "debug", "skip_memory_metrics"),
    ),
    "Checkpoints": ("save_strategy", "save_steps", "save_total_limit"),
}

RESERVED: dict[str, str | None] = {
    "output_dir": "run_dir",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "data_seed": "seed",
    "use_cpu": "--gpu cpu",
    "activation_checkpointing": "trainer.gradient_checkpointing",
    "activation_checkpointing_kwargs": "trainer.gradient_checkpointing_kwargs",
    "num_generations": "sampling.num_generations",
    "max_completion_length": "sampling.max_completion_length",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "reward_weights": "rewards.functions[].weight",
    "per_device_train_batch_size": "pipeline.groups_per_step and pipeline.trainer_tokens_per_micro_batch",
    "gradient_accumulation_steps": "pipeline.groups_per_step and pipeline.trainer_tokens_per_micro_batch",
    "generation_batch_size": "pipeline.groups_per_step",
    "steps_per_generation": "pipeline.groups_per_step",
    "chat_template_kwargs": "dataset.chat_template_kwargs",
    "repetition_penalty": None,
    "generation_kwargs": None,
    "use_vllm": None,
    "disable_tqdm": "observability.progress",
    "remove_unused_columns": None,
    "ignore_data_skip": None,
    "auto_find_batch_size": None,
}
"""Keys that follow from others, whatever their value, and what to set instead. So does every key that begins with `vllm_`."""


CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
"""Values of options that TRL only looks at in the middle of a step."""


class Refusal(NamedTuple):
    default: Any
    reason: str
    instead: str | None


def _refused(reason: str, instead: str | None = None, **defaults: Any) -> dict[str, Refusal]:
    return {key: Refusal(default, reason, instead) for key, default in defaults.items()}


_RANKS = "Slipstream connects its ranks itself"
REFUSED: dict[str, Refusal] = (
    _refused("ranks share a step in Slipstream's own way", "--gpu 0,1", fsdp=None, fsdp_config=None, deepspeed=None)
    | _refused("ranks share a step in Slipstream's own way", "--gpu 0,1", parallelism_config=None)
    | _refused(_RANKS, ds3_gather_for_generation=True, average_tokens_across_devices=True)
    | _refused(_RANKS, ddp_backend=None, ddp_timeout=1800, ddp_bucket_cap_mb=None)
    | _refused(_RANKS, ddp_find_unused_parameters=None, ddp_broadcast_buffers=None)
    | _refused(_RANKS, ddp_static_graph=None, local_rank=-1, log_level_replica="warning")
    | _refused(_RANKS, log_on_each_node=True, save_on_each_node=False)
    | _refused(
        "it configures data loaders and gradient accumulation, and this trainer cuts its steps itself",
        "pipeline.trainer_tokens_per_micro_batch",
        accelerator_config=None,
    )
    | _refused("passes have rows of any length and do not go through the compiled model", torch_compile=False)
    | _refused("the model is not compiled", torch_compile_backend=None, torch_compile_mode=None)
    | _refused("TRL deprecates Liger, and no test of Slipstream covers it", use_liger_kernel=False)
    | _refused("TRL deprecates Liger, and no test of Slipstream covers it", liger_kernel_config=None)
    | _refused("noise in the embeddings makes log-probs that are not the policy's", neftune_noise_alpha=None)
    | _refused("the loss of GRPO has no labels", label_smoothing_factor=0.0, label_names=None)
    | _refused(
        "the reference policy is that with which the run began, and does not move",
        sync_ref_model=False,
        ref_model_mixup_alpha=0.6,
        ref_model_sync_steps=512,
    )
    | _refused(
        "the trainer uploads nothing while it trains",
        "slipstream export --push-to-hub",
        push_to_hub=False,
        hub_model_id=None,
        hub_token=None,
        hub_private_repo=None,
        hub_strategy="every_save",
        hub_always_push=False,
        hub_revision=None,
    )
    | _refused("the trainer uploads nothing", "slipstream journal export", log_completions_hub_repo=None)
    | _refused(
        "producers evaluate",
        "the `evaluation` section",
        eval_strategy="no",
        eval_steps=None,
        eval_delay=0,
        eval_on_start=False,
        eval_accumulation_steps=None,
        eval_do_concat_batches=True,
        eval_use_gather_object=False,
        per_device_eval_batch_size=8,
        num_generations_eval=None,
        batch_eval_metrics=False,
        include_for_metrics=[],
        prediction_loss_only=False,
        bf16_full_eval=False,
        fp16_full_eval=False,
        do_eval=False,
        do_predict=False,
    )
    | _refused(
        "the best adapter is that of the evaluations",
        "evaluation.keep_best",
        load_best_model_at_end=False,
        metric_for_best_model=None,
        greater_is_better=None,
    )
    | _refused(
        "there is no data loader: batches are made of the groups that arrive",
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
        dataloader_in_order=True,
        length_column_name="length",
        train_sampling_strategy="random",
        pad_to_multiple_of="auto",
    )
    | _refused("the ledger orders the prompts", "dataset.shuffle", shuffle_dataset=True)
    | _refused("tokens are counted by metrics of Slipstream's own", include_num_input_tokens_seen="no")
    | _refused(
        "producers generate",
        "the `engine` section",
        use_cache=False,
        cache_implementation=None,
        use_transformers_continuous_batching=False,
        transformers_continuous_batching_config=None,
        use_transformers_paged=False,
    )
    | _refused("producers play the episodes", "environment.max_turns", max_tool_calling_iterations=None)
    | _refused("prompts and completions are text", log_multimodal=True)
    | _refused("a run cannot go on from a checkpoint without the optimizer's state", save_only_model=False)
    | _refused("a signal ends the run with a checkpoint anyway", enable_jit_checkpoint=False)
    | _refused("run folder and journal say where a run goes on", "--resume", resume_from_checkpoint=None)
    | _refused("run folder and journal say where a run goes on", restore_callback_states_from_checkpoint=False)
    | _refused("it is for scripts that choose what to do, and nothing reads it here", do_train=False)
)
"""Keys that would have no effect here, or a harmful one."""

_NO_EPOCHS = "to the trainer a run is one epoch, which ends with it; use steps"
_IN_BACKWARD = "it moves the weights in each backward pass, and a step has several"
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "save_strategy": {
        "epoch": _NO_EPOCHS,
        "best": "the best adapter is that of the evaluations; use evaluation.keep_best",
    },
    "logging_strategy": {"epoch": _NO_EPOCHS},
    "optim": dict.fromkeys(
        (
            *("lomo", "adalomo", "apollo_adamw_layerwise"),
            *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
        ),
        _IN_BACKWARD,
    )
    | dict.fromkeys(
        ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
        "its averages would not be published; use adamw_torch",
    )
    | dict.fromkeys(
        ("adamw_torch_8bit", "adamw_torch_4bit"),
        "resuming is not proven; use adamw_8bit",
    )
    | dict.fromkeys(
        ("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision"),
        "not for this torch; use adamw_torch",
    ),
}
"""Values that TRL knows and that do here what they do not say."""

MODEL_INIT_RESERVED: dict[str, str | None] = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "device_map": "--gpu",
}
"""Keys within `model_init_kwargs` that follow from others."""


TRACKERS = {
    "azure_ml": "azureml",
    "clearml": "clearml",
    "codecarbon": "codecarbon",
    "comet_ml": "comet_ml",
    "dagshub": "dagshub",
    "dvclive": "dvclive",
    "flyte": "flytekit",
    "kubeflow": "",
    "mlflow": "mlflow",
    "neptune": "neptune",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""The trackers of `report_to`, and the packages of which each needs one."""

_OF_BITSANDBYTES = ("adamw_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit", "galore_adamw_8bit")
_OF_OPTIMIZERS = {
    "galore_": ("galore_torch", "galore-torch"),
    "apollo_": ("apollo_torch", "apollo-torch"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "stable_adamw": ("optimi", "torch-optimi"),
}


def package_of_optimizer(name: str) -> tuple[str, str] | None:
    """Return the module and the package that an optimizer needs beside torch."""
    if name.startswith("paged_") or "bnb" in name or name in _OF_BITSANDBYTES:
        return "bitsandbytes", "bitsandbytes"
    return next((needed for begin, needed in _OF_OPTIMIZERS.items() if name.startswith(begin)), None)


SPREAD_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Optimizers whose state has the shape of its parameter, each number by itself, so that every rank can keep a part."""


def of_spread_weights(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values of this section with which several ranks cannot share weights that train."""
    fix = "or set pipeline.shard_base: none, with which every rank keeps all weights"
    if (optimizer := section.get("optim", "adamw_torch_fused")) not in SPREAD_OPTIMIZERS:
        yield f"trainer.optim: {optimizer} does not know parts of parameters; use one of {', '.join(SPREAD_OPTIMIZERS)}, {fix}"
    if section.get("fp16"):
        yield f"trainer.fp16: its scaler would see infinite gradients on the ranks of their parts alone; use bf16, {fix}"


def refusal(key: str, value: Any) -> str | None:
    """Return why a key that is not reserved cannot have this value, and what to do; None where it can."""
    if key in REFUSED and value != REFUSED[key].default and (value, REFUSED[key].default) != (False, "no"):
        _, reason, instead = REFUSED[key]
        shown = "..." if key == "hub_token" else value  # a secret
        return f"`{key}: {shown}` is refused: {reason}; " + (f"use {instead} instead" if instead else "remove it")
    if isinstance(value, str) and value in REFUSED_VALUES.get(key, {}):
        return f"`{key}: {value}` is refused: {REFUSED_VALUES[key][value]}"
    return None
