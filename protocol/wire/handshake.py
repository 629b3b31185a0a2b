"""The check that an engine can serve a trainer, before any work starts.

Guarantee: `problems` is empty exactly when the trainer can use every group of that engine. Each problem is a sentence that ends
with the fix.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from protocol.wire.messages import EngineFacts, Hello

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for log-probs of the distribution that was sampled from (after temperature), which ratios need."""

_SHOWN = 1000  # characters of what a peer sent at will


@dataclass(frozen=True)
class TrainerNeeds:
    base_model_digest: str
    tokenizer_digest: str
    dtype: str
    lora_rank: int
    max_loras: int
    max_completion_length: int
    reward_names: tuple[str, ...]
    engine_quantization: str = ""  # as the trainer's configuration says it; "": none
    quantization: str = ""  # of the trainer's base; "": none
    patches: bool = False  # policies are patches of the weights, and no adapters
    max_model_lens: tuple[int, int] | None = None  # least and largest, where positions are scaled by it; None: any


def problems(needs: TrainerNeeds, facts: EngineFacts, swap_mode: str = "adapter") -> list[str]:
    """Return every reason to refuse an engine, each with its fix. With the `swap_mode` `merged` it needs no LoRA slots."""
    slots = swap_mode == "adapter"
    checks = (
        (
            facts.base_model_digest != needs.base_model_digest,
            f"the producer serves another base model ({facts.base_model_digest[:12]}) than the trainer trains "
            f"({needs.base_model_digest[:12]}): give both the same model.path and model.revision",
        ),
        (
            facts.tokenizer_digest != needs.tokenizer_digest,
            f"the producer has another tokenizer or chat template ({facts.tokenizer_digest[:12]}) than the trainer "
            f"({needs.tokenizer_digest[:12]}): give both the same files",
        ),
        (
            facts.dtype != needs.dtype,
            f"the engine runs in {facts.dtype}, the trainer in {needs.dtype}: set the same model.dtype",
        ),
        (
            facts.logprobs_mode != LOGPROBS_MODE,
            f"the engine reports {facts.logprobs_mode}, importance ratios need {LOGPROBS_MODE}: start it with rl-producer",
        ),
        (
            slots and facts.max_lora_rank < needs.lora_rank,
            f"the engine serves LoRA ranks up to {facts.max_lora_rank}, the trainer's lora.r is {needs.lora_rank}: "
            "restart the producer with the trainer's lora.r",
        ),
        (
            slots and facts.max_loras < needs.max_loras,
            f"the engine has {facts.max_loras} LoRA slots, max_staleness needs {needs.max_loras}: restart the producer "
            "with the trainer's pipeline.max_staleness",
        ),
        *_of_length(needs, facts.max_model_len),
        (
            tuple(facts.reward_names) != needs.reward_names,
            f"the producer scores with {str(facts.reward_names)[:_SHOWN]}, the trainer expects {list(needs.reward_names)}: "
            "give both the same rewards section",
        ),
        (
            facts.quantization != needs.engine_quantization,
            f"the engine's base is quantized as {facts.quantization[:_SHOWN] or 'none'}, the trainer's file says "
            f"{needs.engine_quantization or 'none'}: give both the same engine.quantization",
        ),
        (
            facts.trainer_quantization != needs.quantization,
            f"the trainer's base is quantized as {needs.quantization or 'none'}, the producer's file says "
            f"{facts.trainer_quantization[:_SHOWN] or 'none'}: give both the same model.quantization",
        ),
        (
            needs.patches != (swap_mode == "full"),
            f"the trainer publishes {'patches of the weights' if needs.patches else 'adapters'}, which the producer's file does "
            "not say: give both the same lora section",
        ),
    )
    return [problem for is_one, problem in checks if is_one]


def _of_length(needs: TrainerNeeds, length: int) -> Iterator[tuple[bool, str]]:
    yield (
        length <= needs.max_completion_length,
        f"the engine's max_model_len={length} leaves no room for a prompt beside "
        f"sampling.max_completion_length={needs.max_completion_length}: raise engine.max_model_len",
    )
    if needs.max_model_lens is not None:
        least, most = needs.max_model_lens
        yield (
            not least <= length <= most,
            f"with max_model_len={length} the engine scales positions (longrope, dynamic) as the trainer does not: give both "
            "the same engine.max_model_len; with engine_server it is that of the servers",
        )


def turn_problems(hello: Hello, trainer_gpus: Collection[str] | None) -> list[str]:
    """Return every reason why this producer cannot share these GPUs with a trainer that takes turns on them
    (`pipeline.gpu: turns`). None: the trainer takes no turns."""
    if trainer_gpus is None:
        found = (
            "the producer takes turns on its GPU (pipeline.gpu: turns), and this trainer does not: give both one file"
        )
        return [found] if hello.takes_turns else []
    if not hello.gpus:
        return [
            "the producer does not name its GPU, and the trainer takes turns on its own (pipeline.gpu: turns): start the "
            "producer with --gpu"
        ]
    if not hello.takes_turns and not set(hello.gpus).isdisjoint(trainer_gpus):
        return [
            "the producer uses the trainer's GPU and does not leave it for the trainer's turns: set pipeline.gpu=turns there, too"
        ]
    return []
