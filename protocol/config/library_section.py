"""The sections that belong to vLLM, TRL and PEFT: what Slipstream sets or refuses in them, and how the library checks the rest.

Guarantee: `check` returns the section as it will be used, or raises `ValueError` with the key and the fix. `build` returns an
instance of the library's own class, or raises `ConfigError` with the section, the key, the value and, for an unknown key, the
nearest name that the installed release knows.
"""

import enum
import inspect
import typing
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeVar

from protocol.config import lora_section, trainer_keys
from protocol.config.library_fields import ANY, LibraryField, fields_of_class
from protocol.config.library_values import by_type, check_choice, converted
from protocol.config.other_names import OTHER_NAMES, instead_of
from protocol.errors import ConfigError, DeviceError, is_device_failure

SERVABLE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The LoRA ranks that vLLM has kernels for; an adapter is served by the smallest that holds it."""

ENGINE_RESERVED = {
    "model": "model.path",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "tensor_parallel_size": "--gpu 0,1",
    "enable_lora": None,
    "logprobs_mode": None,
    "max_loras": "pipeline.max_staleness",
    "max_cpu_loras": "pipeline.max_staleness",
    "max_lora_rank": "lora.r",
    "lora_target_modules": "lora.target_modules",
    "override_generation_config": "sampling",
    "runner": None,
    "convert": None,
    "skip_tokenizer_init": None,
}
ENGINE_UNREPRODUCIBLE = {
    "logits_processors": "edits what is sampled",
    "watermark_config": "edits what is sampled",
    "diffusion_config": "does not sample token by token",
    "hf_overrides": "changes the model in the engine only; change the model's config.json",
    "hf_config_path": "changes the model in the engine only; change the model's config.json",
    "model_class_overrides": "changes the model in the engine only",
    "model_weights": "changes the model in the engine only; set model.path",
    "tokenizer_revision": "changes the tokenizer in the engine only; set model.revision",
}
"""Engine arguments with which vLLM's log-probs are not those of the trainer's model, and why."""

LORA_DEFAULTS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
"""Where the file leaves one of these out, so that `--set lora.r=8` does not also change the target modules."""

PEFT_DEFAULTS: dict[str, Any] = {"lora_dropout": 0.0, "use_rslora": False, "init_lora_weights": True}
"""PEFT's of the keys that decide what an adapter learns."""

OWN_KEYS = {
    "lora": {
        "init_from": "Adapter to start from: a folder (of `slipstream sft`, a checkpoint, PEFT) or a hub name, with the "
        "rank, alpha and modules of this section. It is policy version 0, and the reference policy if "
        "`trainer.beta` is not 0."
    },
    "sft": {
        "completion_column": "Column with the wanted answer: a text, or a list of messages. Default: `completion`.",
        "messages_column": "Column with whole conversations instead: the last message is the completion, what is before it the "
        "prompt.",
        "loraplus_lr_ratio": "Learning rate of the matrices B over that of A (LoRA+, arXiv:2402.12354), such as 16. Default: 1.",
    },
}
"""Keys of ours in sections that otherwise belong to a library; they never reach it."""

SFT_RESERVED = {
    "output_dir": "--to",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "save_strategy": None,
    "push_to_hub": "slipstream export --push-to-hub",
    "chat_template_path": "model.path",
    "eos_token": "model.path",
    "pad_token": "model.path",
    "disable_tqdm": "observability.progress",
    "remove_unused_columns": None,
}


DEFAULTS: dict[str, dict[str, Any]] = {"lora": LORA_DEFAULTS, "trainer": trainer_keys.DEFAULTS}
"""Of ours, by section. The library has the defaults of all other keys."""

RESERVED: dict[str, dict[str, str | None]] = {
    "engine": ENGINE_RESERVED,
    "trainer": trainer_keys.RESERVED,
    "sft": SFT_RESERVED,
    "lora": {},
}
"""By section, what Slipstream sets, and what to set instead."""


def check(name: str, section: dict[str, Any]) -> dict[str, Any]:
    """The section `name` as it will be used, or `ValueError`."""
    section = with_defaults(name, section)
    for problem in library_problems(name, section):
        raise ValueError(problem)
    return section


def with_defaults(name: str, section: dict[str, Any]) -> dict[str, Any]:
    return DEFAULTS.get(name, {}) | section


def library_problems(name: str, section: dict[str, Any]) -> Iterator[str]:
    """Yield all that is wrong with the section `name`, without its library."""
    return chain(_problems(name, section), _OF_ONE[name](section))


def for_library(name: str, section: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the section `name` that the library gets."""
    return {key: value for key, value in section.items() if key not in OWN_KEYS.get(name, {})}


def placed_keys(name: str, section: dict[str, Any]) -> dict[str, str | None]:
    """Return the keys that Slipstream sets or refuses in the section `name`, with what to give instead. The library is not asked
    of them."""
    refused: dict[str, dict[str, Any]] = {
        "engine": ENGINE_UNREPRODUCIBLE,
        "trainer": trainer_keys.REFUSED,
        "lora": lora_section.LORA_REFUSED,
    }
    of_vllm = {key for key in section if name == "trainer" and key.startswith("vllm_")}
    return dict.fromkeys({*refused.get(name, {}), *of_vllm}) | RESERVED[name]


def _problems(name: str, section: dict[str, Any]) -> Iterator[str]:
    for key in section:
        if key in RESERVED[name] or (name == "trainer" and key.startswith("vllm_")):
            owner, others = RESERVED[name].get(key), OTHER_NAMES.get(name, {})
            instead = f"; set {owner} instead" if owner else f"; {others[key]}" if key in others else ""
            yield f"`{key}` is set by Slipstream and cannot be given here{instead}"
    for key in OWN_KEYS.get(name, {}):
        value = section.get(key)
        if key != "loraplus_lr_ratio" and value is not None and not (isinstance(value, str) and value.strip()):
            yield f"`{key}` must be a text that is not empty, got {value!r}"
    options = section.get("model_init_kwargs")
    for key in options if isinstance(options, dict) else ():
        if key in trainer_keys.MODEL_INIT_RESERVED:
            owner = trainer_keys.MODEL_INIT_RESERVED[key]
            yield f"`model_init_kwargs.{key}` is set by Slipstream; set {owner} instead"


def _of_engine(section: dict[str, Any]) -> Iterator[str]:
    for key in section:
        if key in ENGINE_UNREPRODUCIBLE:
            yield f"`{key}` {ENGINE_UNREPRODUCIBLE[key]}, so importance ratios would be wrong; remove it"
        if key.startswith("data_parallel_") and (key, section[key]) != ("data_parallel_size", 1):
            yield (
                f"`{key}: {section[key]}` is refused: vLLM answers for its first replica alone, so it is unknown whether the "
                "others took up a policy. Start one rl-producer for each replica, with its own --gpu, instead"
            )
    if section.get("language_model_only") is False:
        yield "`language_model_only: False`: the trainer trains the text model alone; remove it"
    yield from _unless_positive("pipeline_parallel_size", section.get("pipeline_parallel_size", 1))


def _of_trainer(section: dict[str, Any]) -> Iterator[str]:
    return filter(None, (trainer_keys.refusal(key, value) for key, value in section.items()))


def _of_lora(section: dict[str, Any]) -> Iterator[str]:
    yield from _unless_positive("r", section["r"])
    if section["r"] > SERVABLE_RANKS[-1]:
        yield f"`r: {section['r']}` cannot be served: vLLM's largest LoRA rank is {SERVABLE_RANKS[-1]}"
    yield from lora_section.problems(section)


def _of_sft(section: dict[str, Any]) -> Iterator[str]:
    if section.get("completion_column") and section.get("messages_column"):
        yield "`messages_column` and `completion_column` exclude each other; remove one"
    ratio = section.get("loraplus_lr_ratio")
    if ratio is not None and not (isinstance(ratio, int | float) and not isinstance(ratio, bool) and ratio >= 1):
        yield f"`loraplus_lr_ratio` must be a number of at least 1, got {ratio!r}"


def _unless_positive(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        yield f"`{key}` must be a positive integer, got {value!r}"


_OF_ONE = {"engine": _of_engine, "trainer": _of_trainer, "lora": _of_lora, "sft": _of_sft}


Built = TypeVar("Built")
_MAX_LINES = 6  # of a library's error


def build(section: str, factory: Callable[..., Built], values: dict[str, Any], **ours: Any) -> Built:
    """Return `factory(**values, **ours)` after checking what the user wrote against its signature and type hints. Raises
    `ConfigError` where the library does not know a key or refuses a value, and `DeviceError` where it found a GPU that fails;
    `section` is its name in the configuration file."""
    library = f"{factory.__module__.partition('.')[0]}.{getattr(factory, '__name__', factory)}"
    fields = fields_of_class(factory.__module__, getattr(factory, "__name__", "")) or {}
    names = list(inspect.signature(factory).parameters)
    checked = {}
    for key, value in values.items():
        if key not in names:
            hint = instead_of(section, key, dict.fromkeys(names), {}, f"see the documentation of {library}")
            raise ConfigError(f"{section}.{key}: unknown to {library}; {hint}")
        try:
            field = fields.get(key, ANY)
            checked[key] = _of_class(factory, key, converted(value, field), field)
            check_choice(section, key, value)
        except ValueError as error:
            raise ConfigError(f"{section}.{key}: {error} (got {value!r})") from error
    try:
        return factory(**checked, **ours)
    except Exception as error:
        text = str(error) or type(error).__name__
        shown = "\n".join(text.splitlines()[:_MAX_LINES])
        if is_device_failure(error):
            raise DeviceError(
                f"the GPU failed when {library} looked at it: {shown}; nvidia-smi shows its state"
            ) from error
        raise ConfigError(f"{section}: refused by {library}: {shown}") from error


def _of_class(factory: Callable[..., Any], key: str, value: Any, field: LibraryField) -> Any:
    """Make of a value what only the library's own types tell: an instance of a class, or a member of an enum."""
    hint = _type_hint(factory, key)
    has_members = any(isinstance(kind, enum.EnumMeta) for kind in (hint, *typing.get_args(hint)))
    return by_type(value, hint) if field.hint is Any or has_members else value


def _type_hint(factory: Callable[..., Any], key: str) -> Any:
    """The type of one argument. One at a time, because vLLM has hints that only resolve while type checking."""
    for owner in inspect.getmro(factory) if inspect.isclass(factory) else (factory,):
        annotation = inspect.get_annotations(owner).get(key)
        if annotation is not None:
            alone = type("Alone", (), {"__annotations__": {key: annotation}, "__module__": owner.__module__})
            try:
                return typing.get_type_hints(alone, include_extras=True)[key]
            except (NameError, TypeError):
                return Any
    return Any
