"""Whether an engine can serve a trainer, decided before any work starts.

Guarantee: `problems` is empty exactly when the trainer can use every group of that engine. Each problem is a sentence that ends
with the fix.
"""

from dataclasses import dataclass

from protocol.wire.messages import EngineFacts

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for log-probs of the distribution that was sampled from (after temperature), which ratios need."""

_SHOWN = 1000  # characters of what a peer sent at will


@dataclass(frozen=True)
class TrainerNeeds:
    """What the trainer requires of every engine."""

    base_model_digest: str
    tokenizer_digest: str
    dtype: str
    lora_rank: int
    max_loras: int
    max_completion_length: int
    reward_names: tuple[str, ...]


def problems(needs: TrainerNeeds, facts: EngineFacts, swap_mode: str = "adapter") -> list[str]:
    """Every reason to refuse an engine, with its fix; empty if there is none.

    Args:
        swap_mode: how the engine takes new policies. With `merged` it needs no LoRA slots.
    """
    found = []
    if facts.base_model_digest != needs.base_model_digest:
        found.append(
            f"the producer serves another base model ({facts.base_model_digest[:12]}) than the trainer trains "
            f"({needs.base_model_digest[:12]}): give both the same model.path and model.revision"
        )
    if facts.tokenizer_digest != needs.tokenizer_digest:
        found.append(
            f"the producer has another tokenizer or chat template ({facts.tokenizer_digest[:12]}) than the trainer "
            f"({needs.tokenizer_digest[:12]}): give both the same files"
        )
    if facts.dtype != needs.dtype:
        found.append(f"the engine runs in {facts.dtype}, the trainer in {needs.dtype}: set the same model.dtype")
    if facts.logprobs_mode != LOGPROBS_MODE:
        found.append(
            f"the engine reports {facts.logprobs_mode}, importance ratios need {LOGPROBS_MODE}: start it with rl-producer"
        )
    if swap_mode == "adapter" and facts.max_lora_rank < needs.lora_rank:
        found.append(
            f"the engine serves LoRA ranks up to {facts.max_lora_rank}, the trainer's lora.r is {needs.lora_rank}: "
            "restart the producer with the trainer's lora.r"
        )
    if swap_mode == "adapter" and facts.max_loras < needs.max_loras:
        found.append(
            f"the engine has {facts.max_loras} LoRA slots, max_staleness needs {needs.max_loras}: restart the producer "
            "with the trainer's pipeline.max_staleness"
        )
    if facts.max_model_len <= needs.max_completion_length:
        found.append(
            f"the engine's max_model_len={facts.max_model_len} leaves no room for a prompt beside "
            f"sampling.max_completion_length={needs.max_completion_length}: raise engine.max_model_len"
        )
    if tuple(facts.reward_names) != needs.reward_names:
        found.append(
            f"the producer scores with {str(facts.reward_names)[:_SHOWN]}, the trainer expects {list(needs.reward_names)}: "
            "give both the same rewards section"
        )
    return found
