"""Log-probs of the same sampled tokens by vLLM (while sampling, and scoring them again), by the trainer, and in float32.

The trainer's are computed by the product's own probe, so their root mean square is what `swap.probe_tolerance` is compared with.
In float32 on a GPU vLLM attends with a Triton kernel whose products may be TF32; the finding says whether the tolerance holds.
"""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu_check.model import base, sections
from benchmarks.gpu_check.place import Findings, Place
from consumer.link.probe import PolicyProbe
from producer.engine_contract import Adapter
from protocol.config.operation import TOLERANCES
from protocol.config.run import RunConfig
from protocol.wire.messages import Sampling

_PAIRS = (
    ("scoring", "trainer"),
    ("sampling", "trainer"),
    ("sampling", "float32"),
    ("trainer", "float32"),
    ("trainer", "base"),  # how far apart two policies are that must not be confused
)


class Sampled(NamedTuple):
    prompt: list[int]
    completion: list[int]
    sampling: list[float]  # the engine's log-probs of the completion's tokens when it sampled them
    scoring: list[float]  # and when it scored them


def run(place: Place, mode: str, dtype: str = "") -> Findings:
    dtype = dtype or place.dtype
    folder = base(place)
    config = RunConfig.model_validate(sections(place, place.folder / "run", mode, dtype, 0.4))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[: 2 if place.on_cpu else 4]
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    sampled = asyncio.run(_sample(config, folder / "adapter", prompts, Sampling(4, 16 if place.on_cpu else 128, 1.0)))
    of = {
        "sampling": [value for one in sampled for value in one.sampling],
        "scoring": [value for one in sampled for value in one.scoring],
        "trainer": _trainer_logprobs(folder, place.device, dtype, sampled),
    }
    of["base"] = _trainer_logprobs(folder, place.device, dtype, sampled, with_policy=False)
    if dtype != "float32":
        of["float32"] = _trainer_logprobs(folder, place.device, "float32", sampled)
    for one, other in _PAIRS:
        if other in of:
            yield {"what": f"{one} / {other}"} | distance(of[one], of[other])
    apart = distance(of["scoring"], of["trainer"])["rms"]
    yield {"what": "probe tolerance", "nats": TOLERANCES[dtype], "holds": apart <= TOLERANCES[dtype]}


def distance(some: list[float], others: list[float]) -> dict[str, float]:
    """Of log-probs, in nats, and of the importance ratio between them the mean and the effective share of the samples."""
    gap = np.asarray(others) - np.asarray(some)
    ratio = np.exp(gap)
    return {
        "tokens": len(gap),
        "abs_mean": float(np.abs(gap).mean()),
        "abs_p99": float(np.quantile(np.abs(gap), 0.99)),
        "rms": float(np.sqrt(np.mean(gap**2))),
        "abs_max": float(np.abs(gap).max()),
        "ratio_mean": float(ratio.mean()),
        "effective_share": float(ratio.sum() ** 2 / (ratio**2).sum() / len(gap)),
    }


async def _sample(config: RunConfig, policy: Path, prompts: list[list[int]], sampling: Sampling) -> list[Sampled]:
    from producer.engine.engine import VllmEngine

    engine = VllmEngine(config, 0)
    try:
        await engine.warm_up()
        adapter = Adapter(1, "v1", 1, policy)
        await engine.weights.load(adapter)
        engine.weights.activate(adapter)
        groups = await asyncio.gather(*(engine.generate(prompt, sampling, adapter) for prompt in prompts))
        pairs = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
        verified = (engine.weights.verify(adapter, [prompt + one.token_ids]) for prompt, one in pairs)
        scores = await asyncio.gather(*verified)
        return [
            Sampled(prompt, one.token_ids, one.logprobs, score.logprobs[len(prompt) - 1 :])
            for (prompt, one), (score,) in zip(pairs, scores, strict=True)
        ]
    finally:
        engine.shutdown()
        await asyncio.sleep(0.2)  # for vLLM's own tasks to end


def _trainer_logprobs(
    folder: Path, device: str, dtype: str, sampled: list[Sampled], *, with_policy: bool = True
) -> list[float]:
    """As the trainer computes them: base in `dtype`, LoRA in float32, under autocast in bfloat16 on a GPU."""
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype))
    model: Any = PeftModel.from_pretrained(loaded, folder / "adapter").to(device)

    def autocast() -> contextlib.AbstractContextManager[Any]:
        if dtype == "bfloat16" and device == "cuda":
            return torch.autocast(device, torch.bfloat16)
        return contextlib.nullcontext()

    values: list[float] = []
    for one in sampled:
        row = np.array(one.prompt + one.completion, np.int32)[None]
        measured = PolicyProbe(row, 1, model, autocast).measure(1)
        assert measured is not None
        probe = measured.probe()
        values += np.frombuffer(probe.policy if with_policy else probe.base, "<f4")[len(one.prompt) - 1 :].tolist()
    return values
