"""Names of TRL's, transformers', vLLM's, PEFT's, verl's and Axolotl's that mean a key of ours, or that are no longer theirs.

Guarantee: what is named in place of a key is a key that may be given, or a flag. A test looks at each.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from protocol.config.section import nearest

_BATCH = "pipeline.groups_per_step (prompts of a step) and pipeline.trainer_tokens_per_micro_batch (memory)"
_MODE = "use pipeline.gpu: shared or turns, for one GPU"
_EVALUATION = "use the section `evaluation`"
_GONE = "transformers no longer has it; "
_OF_TRAINER = {
    "max_prompt_length": "TRL no longer has it; use dataset.max_prompt_tokens, which skips longer prompts",
    "warmup_ratio": _GONE + "use warmup_steps, of which a number below 1 is the share of all steps",
    "logging_dir": _GONE + "remove it: logs are in run_dir, and TENSORBOARD_LOGGING_DIR is the folder of TensorBoard",
    "overwrite_output_dir": _GONE + "remove it: choose another run_dir, or go on with --resume",
    "save_safetensors": _GONE + "remove it: weights are always safetensors",
    "evaluation_strategy": _GONE + _EVALUATION,
    "no_cuda": _GONE + "use --gpu cpu",
    "use_mps_device": _GONE + "remove it",
    "fp16_opt_level": _GONE + "remove it",
    "half_precision_backend": _GONE + "remove it",
    "group_by_length": _GONE + "remove it: passes are cut by tokens",
    "include_tokens_per_second": _GONE + "remove it: Slipstream counts tokens",
    "tpu_num_cores": _GONE + "remove it",
    "past_index": _GONE + "remove it",
    "jit_mode_eval": _GONE + "remove it",
    "torchdynamo": _GONE + "remove it",
    "push_to_hub_model_id": _GONE + "use slipstream export --push-to-hub",
    "push_to_hub_token": _GONE + "use slipstream export --push-to-hub",
    "wandb_log_unique_prompts": "TRL no longer has it; use log_unique_prompts",
    "adafactor": _GONE + "use optim: adafactor",
    "remove_columns": "remove it: rewards get all columns",
    "unsloth_num_chunks": "of Unsloth; remove it: use pipeline.trainer_tokens_per_micro_batch",
    "unsloth_grpo_mini_batch": "of Unsloth; remove it: use pipeline.trainer_tokens_per_micro_batch",
    "sampling_params": "use the section `sampling`",
    "vllm_sampling_params": "use the section `sampling`",
    "vllm_mode": _MODE,
    "vllm_enable_sleep_mode": "use pipeline.gpu: turns",
    "vllm_gpu_memory_utilization": "use engine.gpu_memory_utilization",
    "vllm_max_model_length": "use engine.max_model_len",
    "vllm_max_model_len": "use engine.max_model_len",
    "vllm_tensor_parallel_size": "use --gpu 0,1 of rl-producer",
    "vllm_quantization": "use engine.quantization",
    "vllm_model_impl": "use engine.model_impl",
    "vllm_structured_outputs_regex": "use sampling.regex",
    "vllm_guided_decoding_regex": "use sampling.regex",
    "vllm_importance_sampling_correction": "use correction.preset",
    "vllm_importance_sampling_mode": "use correction.preset",
    "vllm_importance_sampling_cap": "use correction.ratio_max",
    "vllm_importance_sampling_min": "use correction.ratio_min",
    "vllm_server_base_url": "use engine_server.url",
    "vllm_server_host": "use engine_server.url",
    "vllm_server_port": "use engine_server.url",
    "vllm_server_timeout": "remove it: the daemons wait for each other",
    "max_staleness": "use pipeline.max_staleness",
    "weight_sync_steps": "use pipeline.sync_interval",
    "max_inflight_tasks": "remove it: pipeline.groups_per_step times pipeline.max_staleness + 1 are in flight",
    "environment_factory": "use environment.factory",
    "reward_funcs": "use rewards.functions",
    "peft_config": "use the section `lora`",
    "epsilon_low": "use epsilon",
    "total_epochs": "use num_train_epochs",
    "num_epochs": "use num_train_epochs",
    "train_batch_size": f"use {_BATCH}",
    "micro_batch_size": f"use {_BATCH}",
    "batch_size": f"use {_BATCH}",
    "logger": "use report_to",
    "save_freq": "use save_steps",
    "test_freq": "use evaluation.every_versions",
    "lr": "use learning_rate",
    "kl_coef": "use beta",
    "kl_loss_coef": "use beta",
    "clip_ratio": "use epsilon",
    "clip_ratio_low": "use epsilon",
    "clip_ratio_high": "use epsilon_high",
    "optimizer": "use optim",
    "lr_scheduler": "use lr_scheduler_type",
    "wandb_project": "set the variable WANDB_PROJECT, with report_to: wandb",
    "wandb_entity": "set the variable WANDB_ENTITY, with report_to: wandb",
    "wandb_name": "use run_name",
}
_OF_LORA = {
    "rank": "use r",
    "lora_r": "use r",
    "lora_rank": "use r",
    "alpha": "use lora_alpha",
    "dropout": "use lora_dropout",
    "rslora": "use use_rslora",
    "dora": "use use_dora",
    "lora_target_modules": "use target_modules",
    "lora_target_linear": "use target_modules: all-linear",
    "target_linear": "use target_modules: all-linear",
    "adapter": "use init_from, to start from an adapter",
    "adapter_path": "use init_from",
    "peft_type": "remove it",
    "learning_rate": "use trainer.learning_rate",
    "use_gradient_checkpointing": "use trainer.gradient_checkpointing",
    "random_state": "use seed, at the top of the file",
}
_OF_ENGINE = {
    "swap_space": "vLLM no longer has it; use kv_offloading_size",
    "disable_log_requests": "vLLM no longer has it; remove it, or use enable_log_requests",
    "max_seq_len_to_capture": "vLLM no longer has it; remove it",
    "num_scheduler_steps": "vLLM no longer has it; remove it",
    "use_v2_block_manager": "vLLM no longer has it; remove it",
    "guided_decoding_backend": "vLLM no longer has it; use structured_outputs_config.backend",
    "device": "vLLM no longer has it; use --gpu",
    "max_model_length": "use max_model_len",
    "max_seq_length": "use max_model_len",
    "max_seq_len": "use max_model_len",
    "max_lora_adapters": "use pipeline.max_staleness",
    "temperature": "use sampling.temperature",
    "top_p": "use sampling.top_p",
    "max_tokens": "use sampling.max_completion_length",
    "n": "use sampling.num_generations",
}
_OF_SFT = {
    "max_seq_length": "TRL no longer has it; use max_length",
    "dataset_kwargs": "use the section `dataset`",
    "peft_config": "use the section `lora`",
    "warmup_ratio": _OF_TRAINER["warmup_ratio"],
    **{
        key: text for key, text in _OF_TRAINER.items() if text.startswith(_GONE) and key not in ("evaluation_strategy",)
    },
    "evaluation_strategy": _GONE + "use eval_strategy",
}
_OF_SAMPLING = {
    "n": "use num_generations",
    "max_tokens": "use max_completion_length",
    "max_new_tokens": "use max_completion_length",
    "max_response_length": "use max_completion_length",
    "max_prompt_length": "use dataset.max_prompt_tokens",
    "repetition_penalty": "remove it: the trainer does not reproduce it",
    "presence_penalty": "remove it: the trainer does not reproduce it",
    "frequency_penalty": "remove it: the trainer does not reproduce it",
}
_OF_DATASET = {
    "max_prompt_length": "use max_prompt_tokens",
    "train_files": "use path",
    "prompt_key": "use prompt_column",
    "answer_key": "use options.column of the reward",
    "name": "use subset, for a configuration of the hub",
    "chat_template": "use the tokenizer's; chat_template_kwargs are its arguments",
    "apply_chat_template_kwargs": "use chat_template_kwargs",
}
_OF_MODEL = {
    "name": "use path",
    "model_name_or_path": "use path",
    "torch_dtype": "use dtype",
    "load_in_4bit": "use quantization: nf4",
    "load_in_8bit": "use quantization: int8",
    "attn_implementation": "use trainer.model_init_kwargs.attn_implementation",
    "lora_rank": "use lora.r",
    "lora_alpha": "use lora.lora_alpha",
    "max_seq_length": "use engine.max_model_len",
}
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_OF_FILE = {
    # Axolotl
    "base_model": "use model.path",
    "datasets": "use the section `dataset`",
    "adapter": "use the section `lora`",
    "lora_r": "use lora.r",
    "lora_alpha": "use lora.lora_alpha",
    "lora_dropout": "use lora.lora_dropout",
    "lora_target_modules": "use lora.target_modules",
    "lora_target_linear": "use lora.target_modules: all-linear",
    "load_in_4bit": "use model.quantization: nf4",
    "load_in_8bit": "use model.quantization: int8",
    "sequence_len": "use engine.max_model_len",
    "micro_batch_size": f"use {_BATCH}",
    "gradient_accumulation_steps": f"use {_BATCH}",
    "per_device_train_batch_size": f"use {_BATCH}",
    "num_epochs": "use trainer.num_train_epochs",
    "optimizer": "use trainer.optim",
    "lr_scheduler": "use trainer.lr_scheduler_type",
    "output_dir": "use run_dir",
    "hub_model_id": "use slipstream export --push-to-hub",
    "wandb_project": _OF_TRAINER["wandb_project"],
    "wandb_entity": _OF_TRAINER["wandb_entity"],
    "wandb_name": "use trainer.run_name",
    "trl": "use the sections `trainer` and `sampling`",
    "vllm": "use the section `engine`",
    "rl": "remove it: runs are GRPO",
    "val_set_size": _EVALUATION,
    "model_name_or_path": "use model.path",
    "dataset_name": "use dataset.path",
    "reward_funcs": "use rewards.functions",
    "peft": "use the section `lora`",
    "grpo": "use the section `trainer`",
    # verl
    "data.train_files": "use dataset.path",
    "data.val_files": "use evaluation.dataset.path",
    "data.prompt_key": "use dataset.prompt_column",
    "data.train_batch_size": "use pipeline.groups_per_step",
    "data.max_prompt_length": "use dataset.max_prompt_tokens",
    "data.max_response_length": "use sampling.max_completion_length",
    "data.apply_chat_template_kwargs": "use dataset.chat_template_kwargs",
    "data.shuffle": "use dataset.shuffle",
    "actor_rollout_ref.model.path": "use model.path",
    "actor_rollout_ref.model.lora_rank": "use lora.r",
    "actor_rollout_ref.model.lora_alpha": "use lora.lora_alpha",
    "actor_rollout_ref.model.target_modules": "use lora.target_modules",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "use trainer.gradient_checkpointing",
    f"{_ROLLOUT}.n": "use sampling.num_generations",
    f"{_ROLLOUT}.temperature": "use sampling.temperature",
    f"{_ROLLOUT}.top_p": "use sampling.top_p",
    f"{_ROLLOUT}.top_k": "use sampling.top_k",
    f"{_ROLLOUT}.response_length": "use sampling.max_completion_length",
    f"{_ROLLOUT}.gpu_memory_utilization": "use engine.gpu_memory_utilization",
    f"{_ROLLOUT}.max_model_len": "use engine.max_model_len",
    f"{_ROLLOUT}.max_num_seqs": "use engine.max_num_seqs",
    f"{_ROLLOUT}.enforce_eager": "use engine.enforce_eager",
    f"{_ROLLOUT}.tensor_model_parallel_size": "use --gpu 0,1 of rl-producer",
    f"{_ROLLOUT}.name": "remove it: the engine is vLLM",
    f"{_ROLLOUT}.mode": _MODE,
    f"{_ROLLOUT}.multi_turn": "use environment.factory",
    f"{_ROLLOUT}.val_kwargs": _EVALUATION,
    f"{_ACTOR}.optim.lr": "use trainer.learning_rate",
    f"{_ACTOR}.optim.weight_decay": "use trainer.weight_decay",
    f"{_ACTOR}.optim.lr_warmup_steps": "use trainer.warmup_steps",
    f"{_ACTOR}.grad_clip": "use trainer.max_grad_norm",
    f"{_ACTOR}.ppo_mini_batch_size": "use pipeline.groups_per_step",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "use pipeline.trainer_tokens_per_micro_batch",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "use pipeline.trainer_tokens_per_micro_batch",
    f"{_ACTOR}.use_dynamic_bsz": "remove it: micro-batches are always cut by tokens",
    f"{_ACTOR}.ppo_epochs": "use trainer.num_iterations",
    f"{_ACTOR}.clip_ratio": "use trainer.epsilon",
    f"{_ACTOR}.clip_ratio_low": "use trainer.epsilon",
    f"{_ACTOR}.clip_ratio_high": "use trainer.epsilon_high",
    f"{_ACTOR}.use_kl_loss": "use trainer.beta",
    f"{_ACTOR}.kl_loss_coef": "use trainer.beta",
    f"{_ACTOR}.entropy_coeff": "use trainer.entropy_coef",
    f"{_ACTOR}.loss_agg_mode": "use trainer.loss_type",
    "algorithm.adv_estimator": "use advantage.baseline",
    "algorithm.norm_adv_by_std_in_grpo": "use trainer.scale_rewards",
    "algorithm.kl_ctrl.kl_coef": "use trainer.beta",
    "algorithm.filter_groups": "remove it: groups without signal are never trained",
    "algorithm.rollout_correction": "use the section `correction`",
    "reward_model.overlong_buffer": "use advantage.overlong_buffer_tokens",
    "custom_reward_function.path": "use rewards.functions",
    "custom_reward_function.name": "use rewards.functions",
}
OTHER_NAMES: dict[str, Mapping[str, str]] = {
    "": _OF_FILE,
    "trainer": _OF_TRAINER,
    "lora": _OF_LORA,
    "engine": _OF_ENGINE,
    "sft": _OF_SFT,
    "sampling": _OF_SAMPLING,
    "dataset": _OF_DATASET,
    "model": _OF_MODEL,
}
"""By the section in which a name is given, what to do instead."""


def instead_of(
    section: str,
    key: str,
    valid: Mapping[str, str | None],
    elsewhere: Mapping[str, list[str]],
    otherwise: str,
) -> str:
    """Return a hint for a key that its section does not have.

    Args:
        section: its place in the file; "": the file itself.
        valid: keys that may be meant, with the key that is to be given instead of each; None: itself.
        elsewhere: the places of our keys, by their names.
        otherwise: the hint if nothing is near.
    """
    if key in OTHER_NAMES.get(section, {}):
        return OTHER_NAMES[section][key]
    if len(places := elsewhere.get(key, [])) == 1:
        return f"did you mean `{places[0]}`?"
    hint = nearest(key, [*valid], otherwise)
    for name, owner in valid.items():
        hint = f"did you mean `{owner}`?" if owner and f"`{name}`?" in hint else hint
    return hint


def parts_of(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of others that are below an unknown section of a file, and what to do instead of each."""
    for name, below in value.items() if isinstance(value, dict) else ():
        place = f"{key}.{name}"
        if place in _OF_FILE:
            yield place, _OF_FILE[place]
        else:
            yield from parts_of(place, below)
