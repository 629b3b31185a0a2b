"""`make bench-admission`: what the adaptive limit of groups in the engine saves where the KV cache is too small for all of them.

Guarantee: one real vLLM engine with a cache for about half of what its scheduler would take; bursts of groups with log-normal
lengths go through the product's `Admission`, once with the engine's numbers and once without (then the limit stays at the
ceiling). They take turns, each pair with the same prompts and lengths, and who goes first changes.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from producer.interfaces import Adapter
from producer.rollouts.admission import Admission
from protocol.config.run import RunConfig
from protocol.wire.messages import Sampling

_VOCABULARY = 512
_COMPLETIONS = 8
_LONGEST, _MEDIAN, _SIGMA = 448, 160, 0.6  # tokens of a completion
_PROMPT_TOKENS = 64
_MAX_NUM_SEQS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/admission.json"), help="JSON file to write")
    parser.add_argument("--blocks", type=int, default=180, help="of 32 tokens, in the KV cache (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=60, help="of a burst (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=4, help="pairs of bursts (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as folder:
        runs = asyncio.run(_measure(Path(folder), arguments.blocks, arguments.groups, arguments.repeat))
    report = {"blocks": arguments.blocks, "groups": arguments.groups, "runs": runs} | _summary(runs)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print("\n| limit | tokens/s | preemptions in a burst | limit at the end |\n|---|---:|---:|---:|")
    for kind in ("fixed", "adaptive"):
        one = report[kind]
        print(f"| {kind} | {one['tokens_per_s']:,.0f} | {one['preemptions']:.0f} | {one['limit']:.0f} |")
    print("tokens/s, adaptive against fixed: {1:.2f} ({0:.2f} to {2:.2f})".format(*report["tokens_per_s_ratio"]))


async def _measure(folder: Path, blocks: int, groups: int, repeat: int) -> list[dict[str, Any]]:
    from producer.engine.engine import VllmEngine

    model, adapter = _build(folder)
    engine_section = {
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": _MAX_NUM_SEQS,
        "block_size": 32,
        "num_gpu_blocks_override": blocks,
    }
    config = RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "model": {"path": str(model), "dtype": "float32"},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"function": "unused:reward"}]},
            "sampling": {"num_generations": _COMPLETIONS},
            "lora": {"r": 8},
            "engine": engine_section,
        }
    )
    engine = VllmEngine(config, 0)
    try:
        await engine.warm_up()
        await engine.weights.load(adapter)
        runs = []
        for pair in range(-1, repeat):
            kinds = ("adaptive", "fixed") if pair % 2 else ("fixed", "adaptive")
            for kind in kinds:
                run = await _burst(engine, adapter, kind, groups, seed=pair)
                if pair >= 0:  # the first pair warms up
                    runs.append(run | {"pair": pair, "limited": kind})
                    print(json.dumps(runs[-1]), flush=True)
        return runs
    finally:
        engine.shutdown()


async def _burst(engine: Any, adapter: Adapter, kind: str, groups: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    ceiling = _MAX_NUM_SEQS // _COMPLETIONS + 1
    admission = Admission(ceiling, _COMPLETIONS, engine.current_load if kind == "adaptive" else lambda: None)

    async def group() -> tuple[int, float]:
        prompt = [rng.randrange(3, _VOCABULARY) for _ in range(_PROMPT_TOKENS)]
        length = min(_LONGEST, int(rng.lognormvariate(np.log(_MEDIAN), _SIGMA)) + 1)
        async with admission:
            entered = time.perf_counter()
            completions = await engine.generate(prompt, Sampling(_COMPLETIONS, length, 1.0), adapter)
        return sum(len(completion.token_ids) for completion in completions), time.perf_counter() - entered

    preempted, started = engine.current_load().preemptions, time.perf_counter()
    done = await asyncio.gather(*(group() for _ in range(groups)))
    seconds = time.perf_counter() - started
    return {
        "tokens_per_s": sum(tokens for tokens, _ in done) / seconds,
        "preemptions": engine.current_load().preemptions - preempted,
        "group_s": float(np.median([took for _, took in done])),
        "limit": admission.limit,
        "seconds": seconds,
    }


def _build(folder: Path) -> tuple[Path, Adapter]:
    """A model of 7 M parameters with random weights, and a LoRA adapter for it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    words = {f"w{number}": number for number in range(_VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
        pad_token="w0",
        eos_token="w1",
        unk_token="w2",
    )
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=512, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).save_pretrained(
        folder / "adapter"
    )
    return folder / "model", Adapter(1, "v1", 1, folder / "adapter")


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    by_kind = {kind: [run for run in runs if run["limited"] == kind] for kind in ("fixed", "adaptive")}
    pairs = zip(*(sorted(by_kind[kind], key=lambda run: run["pair"]) for kind in by_kind), strict=True)
    return {
        kind: {
            key: float(np.median([run[key] for run in chosen]))
            for key in ("tokens_per_s", "preemptions", "group_s", "limit")
        }
        for kind, chosen in by_kind.items()
    } | {
        "tokens_per_s_ratio": [
            float(q) for q in np.percentile([a["tokens_per_s"] / f["tokens_per_s"] for f, a in pairs], [25, 50, 75])
        ]
    }


if __name__ == "__main__":
    main()
