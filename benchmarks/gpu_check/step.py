"""A training step of ours beside TRL's on the same batch: `benchmarks.trainer_step`. With FlashAttention beside its asynchronous
trainer, too, which needs it."""

from typing import Any

from benchmarks.gpu_check.place import Findings, Place, need_package
from benchmarks.trainer_step import PEERS, SIZES, measure, unequal_losses

_SMALL = {
    "model": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 64, "dtype": "float32"},
    "num_prompts": 2, "num_generations": 4, "prompt_tokens": 8, "median_tokens": 8, "max_tokens": 16,
}  # fmt: skip


def size_of(place: Place, attention: str | None) -> dict[str, Any]:
    size = SIZES[place.device] | (_SMALL if place.on_cpu else {})
    return size | {"device": place.device, "correct": False, "attention": attention}


def run(place: Place, attention: str | None = None) -> Findings:
    peers: tuple[str, ...] = ("trl",)
    if attention == "flash_attention_2":
        yield {"what": "flash-attn", "version": need_package("flash-attn")}
        peers = PEERS
    report = measure(size_of(place, attention), 2 if place.on_cpu else 5, 1, ("ours", *peers))
    for side in ("ours", *peers):
        yield {
            "what": side,
            "tokens_per_s": report["tokens_per_s"][side],
            "peak_mb": report["peak_mb"][side],
            "passes": report["passes"][side],
            "loss": report["losses"][side],
            "gradient_norm": report["gradient_norms"][side],
        }
    for peer in peers:
        low, middle, high = report["speedups"][peer]
        yield {"what": f"ours / {peer}", "speedup": middle, "lower_quartile": low, "upper_quartile": high}
    if problem := unequal_losses(report):
        raise RuntimeError(problem)
