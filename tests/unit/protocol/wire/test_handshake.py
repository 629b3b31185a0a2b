"""Each reason to refuse an engine, alone and together, with its fix."""

from dataclasses import replace

import msgspec
import pytest

from protocol.wire.handshake import LOGPROBS_MODE, TrainerNeeds, problems
from protocol.wire.messages import EngineFacts, Reject

A, B = "a" * 64, "b" * 64
NEEDS = TrainerNeeds(
    base_model_digest=A,
    tokenizer_digest=A,
    dtype="bfloat16",
    lora_rank=16,
    max_loras=3,
    max_completion_length=256,
    reward_names=("exact", "short"),
)
FACTS = EngineFacts(
    base_model_digest=A,
    tokenizer_digest=A,
    dtype="bfloat16",
    logprobs_mode=LOGPROBS_MODE,
    max_lora_rank=16,
    max_loras=3,
    max_model_len=257,
    reward_names=["exact", "short"],
)
PROBLEMS: list[tuple[dict[str, object], str]] = [
    (
        {"base_model_digest": B},
        "the producer serves another base model (bbbbbbbbbbbb) than the trainer trains (aaaaaaaaaaaa): give both the same "
        "model.path and model.revision",
    ),
    (
        {"tokenizer_digest": B},
        "the producer has another tokenizer or chat template (bbbbbbbbbbbb) than the trainer (aaaaaaaaaaaa): give both the "
        "same files",
    ),
    ({"dtype": "float16"}, "the engine runs in float16, the trainer in bfloat16: set the same model.dtype"),
    (
        {"logprobs_mode": "raw_logprobs"},
        "the engine reports raw_logprobs, importance ratios need processed_logprobs: start it with rl-producer",
    ),
    (
        {"max_lora_rank": 8},
        "the engine serves LoRA ranks up to 8, the trainer's lora.r is 16: restart the producer with the trainer's lora.r",
    ),
    (
        {"max_loras": 2},
        "the engine has 2 LoRA slots, max_staleness needs 3: restart the producer with the trainer's "
        "pipeline.max_staleness",
    ),
    (
        {"max_model_len": 256},
        "the engine's max_model_len=256 leaves no room for a prompt beside sampling.max_completion_length=256: raise "
        "engine.max_model_len",
    ),
    (
        {"reward_names": ["short", "exact"]},
        "the producer scores with ['short', 'exact'], the trainer expects ['exact', 'short']: give both the same rewards "
        "section",
    ),
    (
        {"quantization": "fp8"},
        "the engine's base is quantized as fp8, the trainer's file says none: give both the same engine.quantization",
    ),
    (
        {"trainer_quantization": "nf4"},
        "the trainer's base is quantized as none, the producer's file says nf4: give both the same model.quantization",
    ),
]


def test_an_engine_that_fits_exactly_or_can_do_more() -> None:
    assert problems(NEEDS, FACTS) == []
    assert problems(NEEDS, msgspec.structs.replace(FACTS, max_lora_rank=512, max_loras=8, max_model_len=8192)) == []


def test_an_engine_that_merges_policies_into_its_weights_needs_no_lora_slots() -> None:
    facts = msgspec.structs.replace(FACTS, max_lora_rank=0, max_loras=0)
    assert problems(NEEDS, facts, "merged") == []
    assert len(problems(NEEDS, facts, "adapter")) == 2


@pytest.mark.parametrize("swap_mode", ["adapter", "merged", "full"])
@pytest.mark.parametrize("patches", [False, True])
def test_patches_are_for_an_engine_that_takes_them_and_adapters_for_one_that_does_not(
    swap_mode: str, patches: bool
) -> None:
    found = problems(replace(NEEDS, patches=patches), FACTS, swap_mode)
    assert bool(found) == (patches != (swap_mode == "full"))


@pytest.mark.parametrize(("length", "fits"), [(4096, False), (4097, True), (8192, True), (8193, False)])
def test_an_engine_scales_positions_as_the_trainer(length: int, fits: bool) -> None:
    needs, facts = replace(NEEDS, max_model_lens=(4097, 8192)), msgspec.structs.replace(FACTS, max_model_len=length)
    found = problems(needs, facts)
    assert (found == []) is fits
    assert fits or "give both the same engine.max_model_len" in found[0]


@pytest.mark.parametrize(("facts", "problem"), PROBLEMS, ids=[next(iter(facts)) for facts, _ in PROBLEMS])
def test_each_problem_alone(facts: dict[str, object], problem: str) -> None:
    assert problems(NEEDS, msgspec.structs.replace(FACTS, **facts)) == [problem]


def test_all_problems_together_fit_into_one_reject() -> None:
    changes = {key: value for facts, _ in PROBLEMS for key, value in facts.items()}
    assert set(changes) == set(EngineFacts.__struct_fields__), "every fact is compared"
    found = problems(NEEDS, msgspec.structs.replace(FACTS, **changes))
    assert found == [problem for _, problem in PROBLEMS]
    message = Reject(problems=found)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Reject) == message


def test_what_a_peer_sends_at_will_is_not_repeated_at_any_length() -> None:
    """Whoever says hello again and again would fill the trainer's log, and a `Reject` that nobody can decode."""
    [problem] = problems(NEEDS, msgspec.structs.replace(FACTS, reward_names=["\0" * 128] * 256))
    assert len(problem) < 2000
