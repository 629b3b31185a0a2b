"""Settings by which the state in a checkpoint is made: those that must stay as they were, and those that hold from a start on.

Guarantee: a run goes on with the weights, the moments and the order of prompts that its checkpoint has, or it does not start and
the message names each setting that differs, with both values. Every other setting has its effect from the next step on, also
where optimizer and scheduler keep a copy of it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from peft import LoraConfig
from torch.optim.lr_scheduler import LambdaLR

from consumer.learn.checkpoints import Checkpoint
from protocol.config.run import RunConfig
from protocol.errors import ConfigError

Settings = dict[str, Any]
"""By the keys of the configuration, as JSON has them."""

OF_ADAPTER = frozenset(field.name for field in fields(LoraConfig)) - {
    *("lora_dropout", "ensure_weight_tying", "task_type", "peft_type", "inference_mode", "runtime_config"),
    *("auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
}
"""The fields of a LoraConfig that decide which tensors an adapter has and what they mean."""

OF_OPTIMIZER = ("optim", "optim_args", "optim_target_modules", "fp16")
"""The fields of a GRPOConfig that decide what the state of optimizer and scaler is."""

_HYPERPARAMETERS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


def settings_of(config: RunConfig, arguments: Any, lora: LoraConfig | None) -> Settings:
    """Return what must be equal when a run goes on from a checkpoint.

    Args:
        arguments: the run's GRPOConfig.
    """
    values = {f"trainer.{name}": getattr(arguments, name) for name in OF_OPTIMIZER}
    values["trainer.optim"] = str(_value(arguments.optim)).removesuffix("_fused")
    values |= {"lora": "null"} if lora is None else {f"lora.{name}": getattr(lora, name) for name in sorted(OF_ADAPTER)}
    values |= {"seed": config.seed, "pipeline.sync_interval": config.pipeline.sync_interval}
    plain: Settings = json.loads(json.dumps(values, default=_value))
    return plain


def check_settings(checkpoint: Checkpoint, now: Settings) -> None:
    """
    Raises:
        ConfigError: the checkpoint was written with others.
    """
    before = checkpoint.state.get("settings", now)
    differing = [name for name in {**now, **before} if now.get(name) != before.get(name)]
    if "lora" in differing:
        differing = ["lora"]
    if differing:
        said = [
            f"{name} is {_shown(now, name)} now and was {_shown(before, name)} when {checkpoint.folder.name} was written"
            for name in differing
        ]
        raise ConfigError(
            f"{'; '.join(said)}. The checkpoint does not fit: set it back, or choose another run_dir, which may begin with the "
            f"adapter (lora.init_from: {checkpoint.folder})"
        )


@contextmanager
def present_settings(optimizer: Any, scheduler: LambdaLR) -> Iterator[None]:
    """Keep the hyperparameters that optimizer and scheduler were made with, whatever state is loaded into them inside. The rate
    is that of the schedule at the step of the state. (Schedules that are no function of the step want evaluations of TRL.)"""
    kept = [{name: group[name] for name in _HYPERPARAMETERS if name in group} for group in optimizer.param_groups]
    rates = scheduler.base_lrs
    yield
    scheduler.base_lrs = rates
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)
    step = scheduler.last_epoch
    scheduler._last_lr = [rate * of_step(step) for rate, of_step in zip(rates, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate


def _shown(settings: Settings, name: str) -> str:
    if name == "lora":
        return "null" if "lora" in settings else "an adapter"
    return json.dumps(settings.get(name)).replace('"', "")


def _value(value: Any) -> Any:
    """Return kinds of TRL and PEFT, and their sets of modules, as JSON has them."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", str(value))
