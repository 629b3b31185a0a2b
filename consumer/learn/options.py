"""The arguments of TRL and PEFT, made from the configuration and checked.

Guarantee: options that TRL would only notice in the middle of a step, or never, are refused when the trainer starts.
"""

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from peft import LoraConfig
from trl import GRPOConfig

from consumer.learn.importance import resolve
from protocol.config.library_section import build, for_library
from protocol.config.run import RunConfig
from protocol.config.trainer_keys import package_of_optimizer
from protocol.errors import ConfigError
from protocol.wire.model_folder import VisionLanguage

logger = logging.getLogger(__name__)

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")  # vLLM's list


class RunArguments(GRPOConfig):  # type: ignore[misc]
    """The arguments that TRL takes. Trackers show beside them the sections `SHOWN` of the file."""

    shown: Mapping[str, Any] = MappingProxyType({})

    def to_dict(self) -> dict[str, Any]:
        """Return the values that transformers sends to trackers."""
        told: dict[str, Any] = super().to_dict()
        return told | dict(self.shown)


SHOWN = ("model", "sampling", "pipeline", "replay", "correction", "lora", "swap")
"""Sections that trackers show. Others may hold secrets, such as those of an environment."""


def build_arguments(config: RunConfig, *, on_gpu: bool, num_prompts: int) -> RunArguments:
    """Make the run's GRPOConfig: the `trainer` section, and values that follow from the others.

    Raises:
        ConfigError: TRL does not know a key or refuses a value, or a value cannot have the effect that it seems to ask for.
    """
    chosen, reserved = chosen_values(config, on_gpu=on_gpu), reserved_values(config, on_gpu=on_gpu)
    with former_names():
        arguments: Any = build("trainer", GRPOConfig, chosen, **reserved)
    arguments.__class__ = RunArguments  # only now: errors name the class of TRL
    sections = config.model_dump(mode="json", include=set(SHOWN))
    arguments.shown = {
        f"{name}.{key}": value for name, section in sections.items() for key, value in (section or {}).items()
    }
    if arguments.max_steps <= 0:
        num_batches = int(arguments.num_train_epochs * num_prompts) // config.pipeline.groups_per_step
        arguments.max_steps = max(1, num_batches) * arguments.num_iterations
    check_arguments(arguments, config)
    return cast("RunArguments", arguments)


@contextmanager
def former_names() -> Iterator[None]:
    """Keep transformers 5.23 and newer from warning of `gradient_checkpointing`, which TRL and we set by its former name, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)
        yield


def build_lora(config: RunConfig) -> LoraConfig | None:
    """Make the run's LoraConfig; None where the weights themselves train.

    Raises:
        ConfigError: PEFT does not know a key or refuses a value.
    """
    if config.lora is None:
        return None
    values, ours = {"task_type": "CAUSAL_LM"} | for_library("lora", config.lora), {}
    if config.changes_base:  # checked already, and PEFT's types know no `pissa_niter_16`
        ours["init_lora_weights"] = values.pop("init_lora_weights")
    return build("lora", LoraConfig, values, **ours)


def chosen_values(config: RunConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Return the `trainer` section with the precision of its device, and without checkpoints where memory decides on them."""
    own: dict[str, Any] = {
        "bf16": casts(config, config.trainer, on_gpu=on_gpu),
        "run_name": Path(config.run_dir).absolute().name,
    }
    if checkpoints_by_memory(config):
        own["gradient_checkpointing"] = False
    return own | {name: value for name, value in config.trainer.items() if name != "model_init_kwargs"}


def casts(config: RunConfig, section: Mapping[str, Any], *, on_gpu: bool) -> bool:
    """Return whether passes are under autocast to bfloat16, unless `section` says otherwise. A base that is frozen has 16 bits
    already."""
    return (on_gpu or config.weights == "full") and config.model.dtype == "bfloat16" and not section.get("fp16")


def checkpoints_by_memory(config: RunConfig) -> bool:
    """Return whether each pass recomputes the layers that its device has no room for, because the file does not say which."""
    return config.trainer.keys().isdisjoint({"gradient_checkpointing", "gradient_checkpointing_kwargs"})


def reserved_values(config: RunConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Return the options that follow from the other sections.

    Raises:
        ConfigError: `trainer.model_init_kwargs` is no mapping.
    """
    model_options = config.trainer.get("model_init_kwargs") or {}
    if not isinstance(model_options, dict):
        raise ConfigError(f"trainer.model_init_kwargs: expected a mapping (got {model_options!r})")
    return {
        "output_dir": str(config.checkpoints_dir),
        "seed": config.seed,
        "trust_remote_code": config.model.trust_remote_code,
        "use_cpu": not on_gpu,
        "num_generations": _generations(config),
        "max_completion_length": config.sampling.max_completion_length,
        "temperature": config.sampling.temperature,
        "per_device_train_batch_size": config.completions_per_step,  # TRL's batch is the step; see consumer/learn/loss.py
        "gradient_accumulation_steps": 1,
        "ignore_data_skip": True,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": config.trainer_dtype} | model_options,
    }


def _generations(config: RunConfig) -> int:
    """Return the group that TRL is told of: it takes none of one completion, as teachers alone do, so that the step is one."""
    given = config.sampling.num_generations
    return given if given > 1 else config.completions_per_step


def check_model(arguments: Any, model_config: Any, seen: VisionLanguage | None = None, *, patched_by: str = "") -> None:
    """Refuse options that cannot be combined with this model.

    Args:
        model_config: of its text model.
        seen: facts of its vision-language checkpoint; None: it is of text alone.
        patched_by: the key for which its policies travel as patches; "": they do not.

    Raises:
        ConfigError: names the key and the fix.
    """
    if patched_by and seen is not None:  # the model that is written would have no tower
        raise ConfigError(
            f"{patched_by}: the weights of a vision-language checkpoint ({seen.architecture}) do not travel as patches; train an "
            "adapter that vLLM serves"
        )
    if patched_by and any(getattr(model_config, name, None) for name in _EXPERTS):
        raise ConfigError(
            f"{patched_by}: no patch can be made of a model with experts, whose weights vLLM lays out anew; train an adapter "
            "that vLLM serves"
        )
    if arguments.cast_lm_head_to_fp32 and seen is not None:
        raise ConfigError(
            f"trainer.cast_lm_head_to_fp32: not with the text model of a vision-language checkpoint ({seen.architecture}); "
            "remove it"
        )
    if arguments.cast_lm_head_to_fp32 and model_config.tie_word_embeddings:
        raise ConfigError(
            "trainer.cast_lm_head_to_fp32: the head of this model has the weights of its embeddings (tie_word_embeddings), and "
            "TRL cannot cast those under LoRA; remove it"
        )


def check_arguments(arguments: Any, config: RunConfig) -> None:
    """Refuse values that a `trl.GRPOConfig` accepts and this trainer does not.

    Raises:
        ConfigError: names the key and the fix.
    """
    correction = resolve(config.correction)
    if not correction.ratio_min <= 1 <= correction.ratio_max:
        raise ConfigError(
            f"correction: ratios from {correction.ratio_min:g} to {correction.ratio_max:g} leave out 1, which is that of "
            "a token on-policy; choose ratio_min of at most and ratio_max of at least 1"
        )
    if arguments.loss_type == "vespo" and correction.level in ("sequence", "geometric"):
        raise ConfigError(
            f"correction.preset: {config.correction.preset} has one ratio per completion, and trainer.loss_type: vespo "
            "multiplies those of the tokens itself; use token_truncate, token_mask, icepop or none"
        )
    of_sequence = arguments.importance_sampling_level == "sequence"
    if of_sequence != (arguments.loss_type == "luspo") and arguments.loss_type not in ("grpo", "sapo"):
        logger.warning(
            "trainer.loss_type: %s with importance_sampling_level %s is not the combination of its paper; docs/algorithms.md has "
            "those", arguments.loss_type, arguments.importance_sampling_level,
        )  # fmt: skip
    check_optimizer(str(getattr(arguments.optim, "value", arguments.optim)), on_gpu=not arguments.use_cpu)
    if arguments.use_cpu and (arguments.gradient_checkpointing_kwargs or {}).get("offload"):
        raise ConfigError(
            "trainer.gradient_checkpointing_kwargs: offload moves activations from a GPU to its host, and on a CPU torch ends "
            "the first step with it; remove offload"
        )
    if arguments.world_size > 1:
        raise ConfigError("one trainer process per run: start rl-trainer without accelerate launch or torchrun")


def check_optimizer(name: str, *, on_gpu: bool) -> None:
    """Refuse an optimizer without its library, for which transformers would ask when the first step begins.

    Args:
        name: of `trainer.optim`.

    Raises:
        ConfigError: its library is not installed, or it pages its state where there is no GPU.
    """
    if name.startswith("paged_") and not on_gpu:
        raise ConfigError(
            f"trainer.optim: {name} moves its state between a GPU and the host, and on a CPU bitsandbytes does not; use "
            "adamw_8bit or adamw_torch"
        )
    module, package = package_of_optimizer(name) or ("", "")
    if module == "bitsandbytes":
        need_bitsandbytes(f"trainer.optim: {name}")
    elif module and importlib.util.find_spec(module) is None:
        raise ConfigError(f"trainer.optim: {name} needs {package}: pip install {package}; or use adamw_torch")


def need_bitsandbytes(what: str) -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what} needs bitsandbytes ({error}): in Slipstream's checkout: pip install '.[quantization]'; or remove it"
        ) from error
