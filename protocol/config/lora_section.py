"""The section `lora`: what vLLM serves as an adapter, what the trainer merges, and what is refused.

Guarantee: an adapter that vLLM would serve as another one is merged by the trainer, or refused by the name of its key.
"""

import re
from collections.abc import Iterator
from typing import Any

from protocol.config import trainer_keys
from protocol.config.section import Problems

LORA_SERVABLE: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""The values with which vLLM can serve an adapter. With others the trainer merges it, and policies travel as patches."""

LORA_REFUSED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None,),
    "use_qalora": (False,),
}
"""Keys that neither vLLM serves nor the trainer merges, and the values that they may have."""

_INIT = re.compile(r"olora|pissa(_niter_\d+)?")  # the others need data


def merged_keys(section: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys of a section `lora` for which the trainer merges the adapter."""
    return tuple(key for key, values in LORA_SERVABLE.items() if key in section and section[key] not in values)


def changes_base(section: dict[str, Any]) -> bool:
    """Return whether an adapter of this section `lora` begins with a part of the base, which PEFT takes out of the base."""
    return _INIT.fullmatch(str(section.get("init_lora_weights"))) is not None


def problems(section: dict[str, Any]) -> Iterator[str]:
    """Yield what can neither be served nor merged."""
    for key, allowed in LORA_REFUSED.items():
        if key in section and section[key] not in allowed:
            yield f"`{key}: {section[key]}` can neither be served by vLLM nor merged by the trainer; remove it"
    if (task := section.get("task_type")) not in (None, "CAUSAL_LM"):
        yield f"`task_type: {task}`: a policy writes texts, and PEFT would load its adapter as another kind of model; remove it"
    for key in ("layers_to_transform", "layers_pattern"):
        if section.get(key) is not None and isinstance(target := section.get("target_modules"), str):
            given = f"`{target}`, the default," if target == "all-linear" else f"`{target}`"
            yield f"`{key}`: it needs a list of target_modules, and {given} is none; set one, such as [q_proj, v_proj]"
    init, merged = section.get("init_lora_weights", True), merged_keys(section)
    if init not in LORA_SERVABLE["init_lora_weights"] and not changes_base(section):
        yield (
            f"`init_lora_weights: {init}` can neither be served by vLLM nor merged by the trainer; use true, gaussian, "
            "orthogonal, olora, pissa or pissa_niter_16"
        )
    if merged and section.get("target_parameters"):
        yield f"`target_parameters`: the trainer cannot merge an adapter of experts; remove it, or {merged[0]}"
    if section.get("init_from") and changes_base(section):
        yield f"`init_from`: with `init_lora_weights: {init}` an adapter begins at the model itself; remove one of them"


def patch_problems(config: Any) -> Problems:
    """Yield the settings with which no policy can travel as a patch of the checkpoint."""
    if config.lora is not None and config.trainable:
        yield "trainable: parameters are chosen with `lora: null` alone; an adapter has lora.target_modules"
    if config.weights != "full":
        return
    key = config.patched_by
    instead = "train an adapter" if config.lora is None else f"remove {key}"
    if config.model.dtype != "bfloat16":
        yield (
            f"model.dtype: {config.model.dtype}: with `{key}` policies travel as changes of 16 bits; set bfloat16, or {instead}"
        )
    if config.swap.mode == "merged":
        yield f"swap.mode: merged: with `{key}` the engine has no adapter to merge; remove it"
    if config.swap.in_flight == "finish":
        yield f"swap.in_flight: finish needs the old weights, which were replaced; use continue or restart, or {instead}"
    if config.model.quantization is not None:
        yield (
            f"model.quantization: weights in {config.model.quantization} neither train nor take up an adapter; remove it, or "
            f"{instead}"
        )
    if config.engine.get("quantization"):
        yield f"engine.quantization: patches are of the weights as the checkpoint has them; remove it, or {instead}"
    if config.engine_server is not None:
        yield f"engine_server: a server can only be given adapters; remove it, or {instead}"
    if config.pipeline.shard_base == "layers" and config.lora is None:
        yield from trainer_keys.of_spread_weights(config.trainer)
    elif config.pipeline.shard_base == "layers":
        yield f"pipeline.shard_base: layers: with `{key}` the trainer merges whole layers; use none, or {instead}"
