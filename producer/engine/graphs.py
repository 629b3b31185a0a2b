"""The CUDA graphs of an engine, and the tokens of a step: defaults for rollouts, where many sequences run at once.

Guarantee: every step that only decodes finds a graph that was captured, and of a small model every step does. What `engine:` sets
of either stays.

vLLM launches a step kernel by kernel if it has more tokens than the largest graph, which is one of 512 on most GPUs. With LoRA
that is a thousand launches or more. A small model has computed before the next kernel is launched, so it waits for the CPU. vLLM
also captures no decoding of more sequences than `max_num_seqs`, so a graph of 272 serves no step of 265: one of exactly as many
sequences as have places is among the sizes.

A step of a small model has at most `LEAST_TOKENS` tokens, or as many of prompts as of decoding. More would pay for nothing,
because so many tokens fill a GPU's kernels already, and would take graphs of their own. Larger models keep vLLM's number of
tokens, because their long steps compute, and graphs would save little.

Beyond vLLM's largest graph the sizes grow by an eighth. So at most a ninth of a step is padding, and there are a quarter more
graphs to capture than vLLM's, some seconds, where vLLM's steps of 16 would more than double them. For each token of the largest
graph FlashAttention 3 takes 0.5 MiB with 32 heads of 128; vLLM measures that before it sizes the KV cache.

With speculative decoding all stays vLLM's: its sizes are multiples of the tokens that a sequence decodes at once, for which the
tokens of a step must have room.
"""

from collections.abc import Iterable, Iterator

LAUNCH_BOUND = 1_000_000_000
"""Parameters of a model from which on a full step takes longer to compute than to launch."""
LEAST_TOKENS = 2048
"""Tokens of a step, as vLLM has them on most GPUs."""


def tokens_of_step(of_vllm: int, places: int) -> int:
    """Return the most tokens of a step of a small model, at most those that vLLM would take."""
    return min(of_vllm, max(LEAST_TOKENS, 2 * places))


def capture_sizes(of_vllm: Iterable[int], largest: int, places: int) -> list[int]:
    """Return the numbers of tokens for which graphs are captured: those `of_vllm`, the number of `places`, and more up to the
    `largest`."""
    own = list(of_vllm)
    return sorted({*own, min(places, largest), *_eighths(max(own), largest)})


def _eighths(size: int, largest: int) -> Iterator[int]:
    """Yield sizes from this one on, with eight or more steps to each power of two, and the largest."""
    while size < largest:
        yield size
        size += max(8, 1 << (size.bit_length() - 4))
        if size >= largest:
            yield largest
