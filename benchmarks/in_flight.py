"""`make bench-in-flight`: what becomes of long completions at a swap, by `swap.in_flight`: tokens/s, staleness, old adapters.

Guarantee: one real engine under the producer's own registry and groups; the three ways take turns, meet the same lengths in the
same order and as many swaps, and there are always as many groups in the engine. The time between swaps is such that a
completion of median length takes two of them, at the pace that the engine has just before. Tokens are counted when their
group is done, from the fourth swap of a turn on.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
from prometheus_client import CollectorRegistry

from producer.interfaces import Adapter, Completion, DownloadedPolicy, Engine, PolicyWeights
from producer.metrics import ProducerMetrics
from producer.policies.loading import PolicyLoader
from producer.policies.registry import AdapterRegistry
from producer.policies.swap_report import SwapReport
from producer.policies.verification import SwapProof
from producer.rollouts.in_flight import InFlight, OnSwap
from producer.state import Counters
from producer.timeline import Timeline
from protocol.config.run import RunConfig
from protocol.config.sections.swap import TOLERANCES
from protocol.wire.adapter_blob import AdapterBlob, pack
from protocol.wire.messages import PolicyInfo, Sampling

NUM_COMPLETIONS = 4  # of a group
MODES: tuple[OnSwap, ...] = get_args(OnSwap)
_MAX_LENGTH = 1024
_RANK = 8
_PROMPT = list(range(3, 35))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/in_flight.json"), help="JSON file to write")
    parser.add_argument("--groups", type=int, default=12, help="in the engine at once (default: %(default)s)")
    parser.add_argument("--median-tokens", type=int, default=256, help="of log-normal lengths (default: %(default)s)")
    parser.add_argument("--swaps", type=int, default=8, help="that count, of each turn (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way (default: %(default)s)")
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-in-flight-") as scratch:
        _print(asyncio.run(_measure(Path(scratch), arguments)))


class WatchedWeights:
    """The engine's weights, and when they let go of each version."""

    def __init__(self, weights: PolicyWeights) -> None:
        self.load, self.verify, self.activate = weights.load, weights.verify, weights.activate
        self._weights = weights
        self.unloaded_at: dict[int, float] = {}

    async def discard(self, adapter: Adapter) -> None:
        self.unloaded_at[adapter.version] = time.perf_counter()
        await self._weights.discard(adapter)


async def _measure(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The report, which is written after every round."""
    config = _config(_build_model(scratch / "model"), scratch)
    blobs = [_adapter(scratch / "model", scratch / f"peft-{seed}", seed) for seed in range(2)]
    from producer.engine.engine import VllmEngine

    engine = VllmEngine(config, 0)
    turns: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    try:
        await engine.warm_up()
        watched, counters = WatchedWeights(engine.weights), Counters()
        report = SwapReport(counters, ProducerMetrics(CollectorRegistry()), Timeline(scratch / "timeline.jsonl"))
        loader = PolicyLoader(watched, lambda num_bytes: scratch / "adapters", SwapProof(TOLERANCES["float32"]))
        adapters = AdapterRegistry(loader, report)
        unloading = asyncio.create_task(adapters.unload_released())
        swaps = _Swaps(adapters, blobs)
        for index in range(arguments.repeat):
            order = MODES[index % 3 :] + MODES[: index % 3]
            for mode in order:
                turns[mode].append(await _turn(mode, index, engine, watched, adapters, counters, swaps, arguments))
            arguments.out.write_text(json.dumps(_report(turns), indent=1), encoding="utf-8")
        adapters.start_session(PolicyInfo(0, "0" * 64, 0))
        await adapters.unload_idle()
        unloading.cancel()
    finally:
        engine.shutdown()
        await asyncio.sleep(0.1)
    return _report(turns)


class _Swaps:
    """Publishes versions, which go on over all turns; the weights are those of two adapters in turn."""

    def __init__(self, adapters: AdapterRegistry, blobs: list[tuple[bytes, str]]) -> None:
        self._adapters = adapters
        self._blobs = blobs
        self.version = -1

    async def publish(self) -> None:
        blob, digest = self._blobs[(self.version + 1) % len(self._blobs)]
        policy = PolicyInfo(self.version + 1, digest, len(blob))
        assert await self._adapters.publish(DownloadedPolicy(policy, blob, time.monotonic()))
        self.version += 1


async def _turn(
    mode: OnSwap,
    seed: int,
    engine: Engine,
    watched: WatchedWeights,
    adapters: AdapterRegistry,
    counters: Counters,
    swaps: _Swaps,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    in_flight = InFlight(engine, adapters, counters, mode)
    draw = np.random.default_rng(seed)
    done: list[tuple[float, int, list[Completion]]] = []  # when, newest version then, completions
    live_at: dict[int, float] = {}

    async def keep_one_going() -> None:
        while True:
            length = int(np.clip(draw.lognormal(np.log(arguments.median_tokens), 0.7), 8, _MAX_LENGTH))
            sampling = Sampling(NUM_COMPLETIONS, length, 1.0)
            completions = await in_flight.sample(_PROMPT, sampling)
            done.append((time.perf_counter(), swaps.version, completions))

    await swaps.publish()
    swap_every_s = await _pace_s(in_flight, arguments) / 2
    workers = [asyncio.create_task(keep_one_going()) for _ in range(arguments.groups)]
    began, before = 0.0, Counters()
    for number in range(3 + arguments.swaps):  # until long completions are among those that are under way
        await asyncio.sleep(swap_every_s)
        if number == 2:
            began, before = time.perf_counter(), Counters(**vars(counters))
        await swaps.publish()
        if number >= 2:
            live_at[swaps.version] = time.perf_counter()
    await asyncio.sleep(swap_every_s)
    ended = time.perf_counter()
    spent = Counters(**vars(counters))
    held_s = [min(watched.unloaded_at.get(version - 1, ended), ended) - at for version, at in live_at.items()]
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    return _numbers(
        [(newest, completions) for at, newest, completions in done if began <= at <= ended],
        ended - began,
        swap_every_s,
        held_s,
        cut=spent.cut - before.cut,
        dropped=spent.dropped_tokens - before.dropped_tokens,
    )


async def _pace_s(in_flight: InFlight, arguments: argparse.Namespace) -> float:
    """Time that completions of median length take when as many are in the engine."""
    sampling = Sampling(NUM_COMPLETIONS, arguments.median_tokens, 1.0)
    started = time.perf_counter()
    await asyncio.gather(*(in_flight.sample(_PROMPT, sampling) for _ in range(arguments.groups)))
    return time.perf_counter() - started


def _numbers(
    done: list[tuple[int, list[Completion]]],
    seconds: float,
    swap_every_s: float,
    held_s: list[float],
    *,
    cut: int,
    dropped: int,
) -> dict[str, float]:
    """Staleness is against the newest version when the group was done."""
    ages = [
        newest - np.concatenate([completion.token_versions for completion in completions])
        for newest, completions in done
    ]
    tokens = np.concatenate(ages)
    completions = sum(len(completions) for _, completions in done)
    return {
        "swap_every_s": swap_every_s,
        "tokens_per_s": len(tokens) / seconds,
        "dropped_per_s": dropped / seconds,
        "token_staleness": float(tokens.mean()),
        "group_staleness": float(np.mean([age.max() for age in ages])),
        "group_staleness_max": float(tokens.max()),
        "cuts_per_completion": cut / completions,
        "old_version_s": statistics.median(held_s),
        "old_version_max_s": max(held_s),
    }


def _config(model: Path, scratch: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(scratch / "run"),
            "model": {"path": str(model), "dtype": "float32"},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"function": "unused:reward"}]},
            "pipeline": {"max_staleness": 6},  # adapters in the engine at once, less 2
            "sampling": {"num_generations": NUM_COMPLETIONS, "max_completion_length": _MAX_LENGTH},
            "lora": {"r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": "all-linear"},
            "engine": {"max_model_len": _MAX_LENGTH + len(_PROMPT), "max_num_seqs": 64, "disable_log_stats": True},
        }
    )


def _build_model(folder: Path) -> Path:
    """Random weights, and no end-of-sequence token, so that lengths are those that were asked for."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    vocabulary = {str(number): number for number in range(512)}
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2 * _MAX_LENGTH, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="0").save_pretrained(folder)
    return folder


def _adapter(model: Path, folder: Path, seed: int) -> tuple[bytes, str]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    lora = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lora).save_pretrained(folder)
    return pack(
        AdapterBlob((folder / "adapter_config.json").read_bytes(), (folder / "adapter_model.safetensors").read_bytes())
    )


def _report(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and quartiles of each way; of tokens/s also against `finish` in the same round."""
    report: dict[str, Any] = {}
    for mode, runs in turns.items():
        columns = {name: [run[name] for run in runs] for name in runs[0]}
        pairs = zip(columns["tokens_per_s"], turns["finish"], strict=True)
        columns["tokens_per_s_against_finish"] = [rate / other["tokens_per_s"] for rate, other in pairs]
        report[mode] = {
            name: {"median": statistics.median(v), "quartiles": _quartiles(v)} for name, v in columns.items()
        }
    return report


def _quartiles(values: list[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.25, 0.75))]


def _print(report: dict[str, Any]) -> None:
    names = next(iter(report.values()))
    print(f"{'':30}" + "".join(f"{mode:>26}" for mode in report))
    for name in names:
        cells = ((rows[name]["median"], *rows[name]["quartiles"]) for rows in report.values())
        print(f"{name:30}" + "".join(f"{'{:.3f} ({:.3f}..{:.3f})'.format(*cell):>26}" for cell in cells))


if __name__ == "__main__":
    main()
