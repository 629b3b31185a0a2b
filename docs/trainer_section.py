"""The `trainer` section of docs/configuration.md, from the table in protocol/config/trainer_keys.py."""

from collections.abc import Iterator
from typing import Any

from docs.markdown import grouped, reserved, row
from protocol.config import trainer_keys

TRAINER = """\
### `trainer`

[`trl.GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig) with transformers' `TrainingArguments`, read by
the trainer. Slipstream's defaults are for LoRA, because TRL's are for full fine-tuning
([learning rates compared](../examples/smollm2/README.md#learning-rates)). With `lora: null` the learning rate is TRL's. On a GPU
`bf16` is true for a model in bfloat16. Without `gradient_checkpointing` [memory decides](models.md#activations); TRL recomputes
all layers. Other defaults that decide what a run learns and costs:
"""

OTHERS = """\
Every key that is in none of the next tables works as TRL and transformers document it; often useful are `max_steps`,
`loss_type`, `beta` and `num_iterations`.
"""

RESERVED = """\
These follow from other keys:
"""

REFUSED = """\
Keys that would have no effect or a harmful one are refused with the reason, unless they have the value that applies anyway: those
of `fsdp`, `deepspeed`, `ddp_*`, `torch_compile`, `dataloader_*` and others. So is every key that starts with `vllm_`,
because producers generate. These have another place:
"""

REFUSED_VALUES = """\
Of keys that work, these values are refused:
"""


def trainer_section() -> Iterator[str]:
    """Yield the lines of the section."""
    yield from [TRAINER, *defaults(), OTHERS]
    model_options = {f"model_init_kwargs.{key}": owner for key, owner in trainer_keys.MODEL_INIT_RESERVED.items()}
    yield from [RESERVED, *reserved(trainer_keys.RESERVED | model_options)]
    yield from [REFUSED, *refused_unless_default(trainer_keys.REFUSED)]
    yield from [REFUSED_VALUES, *refused_values(trainer_keys.REFUSED_VALUES)]


def defaults() -> Iterator[str]:
    """Yield a row for each key, with TRL's default beside ours."""
    yield row("key", "Slipstream", "TRL")
    yield "|---|---|---|"
    for key, theirs in trainer_keys.TRL_DEFAULTS.items():
        shown = [f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in (_ours(key), theirs)]
        yield row(f"`{key}`", *shown)
    yield ""


def _ours(key: str) -> Any:
    return trainer_keys.DEFAULTS.get(key, trainer_keys.TRL_DEFAULTS[key])


def refused_unless_default(keys: dict[str, trainer_keys.Refusal]) -> Iterator[str]:
    """Yield a row for the keys of each other place; those without one are in the text."""
    moved = {key: _code(refusal.instead) for key, refusal in keys.items() if refusal.instead is not None}
    yield from grouped(("keys", "use instead"), moved)


def refused_values(keys: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield a row for all values of a key that are refused for the same reason."""
    yield row("key", "values", "why")
    yield "|---|---|---|"
    for key, values in keys.items():
        for reason in dict.fromkeys(values.values()):
            same = ", ".join(f"`{value}`" for value, why in values.items() if why == reason)
            yield row(f"`{key}`", same, reason)
    yield ""


def _code(instead: str) -> str:
    return instead if "`" in instead else f"`{instead}`"
