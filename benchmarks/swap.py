"""`make bench-swap`: a policy from the trainer's call to the producer's engine, by size and way, and what it costs decoding.

Guarantee: a trainer process and a real vLLM engine, with everything between them the product's, over ipc. Within a run of one
size several ways take turns: through shared memory with both proofs, by bits alone, and without a proof (a switch of this
benchmark alone); in chunks with both; and pause-and-load (the adapter is saved to disk, vLLM is paused, loads and resumes). All
the while the same number of requests is in the engine, each token of which is noted when it arrives. A gap is the time between
two tokens of one request; those of a swap lie between the publication and the first token of the new version, ordinary ones in
the second before.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from prometheus_client import CollectorRegistry

from benchmarks.groups import DTYPES, ENGINE_FACTS, ENGINE_SHARE, MAX_MESSAGE_BYTES
from benchmarks.made_on import made_on
from benchmarks.swap_trainer import serve
from benchmarks.tasks import TASKS
from producer.app.timeline import Timeline
from producer.engine.own_arguments import own_arguments
from producer.engine_contract import Adapter
from producer.link.events import LinkEvent, PolicyArrived
from producer.link.session import Link, Mailbox
from producer.metrics import Counters, ProducerMetrics, Workload
from producer.policies.loader import DownloadedPolicy, PolicyLoader
from producer.policies.probe import SwapProof
from producer.policies.registry import AdapterRegistry, SwapReport
from protocol.channel.client import ZmqClient
from protocol.config.operation import TOLERANCES, TransportSection
from protocol.config.run import RunConfig
from protocol.runtime.scratch import SharedMemory, shared_memory
from protocol.wire import adapter_blob, weight_patch
from protocol.wire.messages import Hello
from slipstream_extras.relays.sources import PolicySources

RANKS = {1: 4, 10: 32, 40: 128, 160: 512}
"""Of an adapter of about so many MB for the model of `_build_model`."""
WAYS = ("shared memory", "chunks", "pause and load", "bits alone", "no proof")
FULL_WAYS = (WAYS[0], WAYS[1], WAYS[2])
"""The ways of all weights of SmolLM2, in this order: patches, proved by bits alone, and last the whole checkpoint, after which no
patch fits the engine."""
_NUM_STREAMS = 8
_LENGTH = 128
_AROUND_S = 1.0
_TOLERANCE = {"float32": 0.01, "bfloat16": TOLERANCES["bfloat16"]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/swap.json"), help="JSON file to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(RANKS), choices=list(RANKS), help="MB")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--repeat", type=int, default=5, help="swaps of each way (default: %(default)s)")
    parser.add_argument(
        "--mode", choices=("adapter", "merged", "full"), default="adapter", help="swap.mode, or lora: null"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="by which all weights move, each one")
    parser.add_argument("--device", choices=list(DTYPES), default="cpu", help="of the engine and the trainer")
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    made, swaps = made_on(), []
    for size in [0] if arguments.mode == "full" else arguments.sizes:
        with tempfile.TemporaryDirectory(prefix="bench-swap-") as scratch:
            swaps += asyncio.run(_measure(Path(scratch), size, arguments))
    report = {
        **made,
        "mode": arguments.mode,
        "learning_rate": arguments.learning_rate,
        "device": arguments.device,
        "streams": _NUM_STREAMS,
        "swaps": swaps,
    }
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    _print(swaps)


@dataclass
class Traffic:
    """The requests that are always in the engine, and when each of their tokens came."""

    llm: Any
    pin: Callable[[], Any]
    with_lora: bool
    tokens: list[tuple[float, int]] = field(default_factory=list)  # time, stream
    gaps: list[tuple[float, float]] = field(default_factory=list)  # time, gap
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    _ids: Any = field(default_factory=itertools.count)

    async def stream(self, number: int) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        while True:
            with self.pin() as adapter:
                params = SamplingParams(
                    max_tokens=_LENGTH, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
                )
                prompt = {"type": "token", "prompt_token_ids": [3 + number] * 32}
                lora = LoRARequest(adapter.name, adapter.id, str(adapter.path)) if self.with_lora else None
                before = None
                async for output in self.llm.generate(prompt, params, f"stream-{next(self._ids)}", lora_request=lora):
                    now = time.monotonic()
                    self.tokens += [(now, number)] * len(output.outputs[0].token_ids)
                    if len(self.tokens) > 10 * _NUM_STREAMS:
                        self.flows.set()
                    if before is not None:
                        self.gaps.append((now, now - before))
                    before = now

    def pace(self, since: float, until: float) -> float:
        """Tokens per second."""
        return sum(since <= at < until for at, _ in self.tokens) / (until - since)

    def gaps_between(self, since: float, until: float) -> list[float]:
        return [gap for at, gap in self.gaps if since <= at < until + gap]


class Receiver:
    """What the link tells: policies go to the registry, times are kept. Everything else does not happen here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, registry: AdapterRegistry) -> None:
        self._loop = loop
        self._registry = registry
        self.arrivals: asyncio.Queue[tuple[float, DownloadedPolicy]] = asyncio.Queue()

    def __call__(self, event: LinkEvent) -> None:
        if isinstance(event, PolicyArrived):
            self._loop.call_soon_threadsafe(self.arrivals.put_nowait, (time.monotonic(), event.downloaded))


async def _measure(scratch: Path, size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    is_full = arguments.mode == "full"
    if is_full:
        config = _full_config(scratch)
    else:
        config = _config(_build_model(scratch / "model"), scratch, RANKS[size], arguments.mode, arguments.device)
    from producer.engine.engine import VllmEngine

    workers = {"adapter": "SwitchedLoading", "merged": "SwitchedMerging", "full": "TimedPatching"}[arguments.mode]
    extension = {"worker_extension_cls": f"benchmarks.switched_proof.{workers}"}
    with patch("producer.engine.configuration.own_arguments", lambda *given: own_arguments(*given) | extension):
        engine = VllmEngine(config, 0)
    found: list[dict[str, Any]] = []
    try:
        await engine.warm_up()
        timeline = Timeline(scratch / "timeline.jsonl")
        with shared_memory() as memory:
            for side_number, ways in enumerate(_sides(arguments)):
                folder = scratch / f"{side_number}-{ways[0][:4]}"
                side = await Side.start(folder, engine, timeline, memory, config, ways[0], arguments)
                for way in ways:
                    found.append({"size_mb": size, "way": way} | await side.swap())
                    print(
                        f"{size} MB, {way}: live after {1000 * found[-1]['live_s']:.0f} ms", file=sys.stderr, flush=True
                    )
                await side.end()
    finally:
        engine.shutdown()
        await asyncio.sleep(0.1)
    return found


def _sides(arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the ways of the swaps of each side: one swap, or with all weights, which take long to load, all of a way."""
    if arguments.mode == "full":
        return [(way,) * arguments.repeat for way in FULL_WAYS if way in arguments.ways]
    ways = [way for way in arguments.ways if way != WAYS[2] or arguments.mode == "adapter"]
    return [(way,) for number in range(arguments.repeat) for way in ways[:: -1 if number % 2 else 1]]


class Side:
    """A trainer, the link to it and traffic, for swaps after the first version."""

    pipe: Connection
    child: ForkServerProcess
    folder: Path
    engine: Any
    way: str
    registry: AdapterRegistry
    receiver: "Receiver"
    link: Link
    traffic: Traffic
    streams: list["asyncio.Task[None]"]
    paused: Adapter
    is_full: bool
    flips: list[tuple[float, float]]
    events: list[dict[str, Any]]  # of the timeline

    @classmethod
    async def start(
        cls,
        folder: Path,
        engine: Any,
        timeline: Timeline,
        memory: SharedMemory,
        config: RunConfig,
        way: str,
        arguments: argparse.Namespace,
    ) -> "Side":
        side = cls()
        await asyncio.to_thread(folder.mkdir)
        endpoints = (f"ipc://{folder}/control", f"ipc://{folder}/blobs")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])  # its imports take seconds
        side.pipe, theirs = context.Pipe()
        model = engine.capabilities.tokenizer_folder
        side.is_full = is_full = config.weights == "full"
        moves = arguments.learning_rate if is_full else config.max_lora_rank
        settings = (moves, way in (WAYS[0], *WAYS[3:]), arguments.device)
        side.child = context.Process(target=serve, args=(theirs, endpoints, model, folder, *settings))
        side.child.start()
        side.folder, side.engine, side.way = folder, engine, way
        await asyncio.to_thread(side.pipe.recv)
        place = folder if memory.folder is None or way == WAYS[2] else memory.folder / folder.name
        place.mkdir(exist_ok=True)  # its own, because every side has a version 0
        proof = SwapProof(_TOLERANCE[config.model.dtype])
        unpack = (weight_patch if is_full else adapter_blob).unpack
        loader = PolicyLoader(engine.weights, lambda num_bytes: place, proof, unpack=unpack)
        side.events = []

        def record(event: str, **fields: Any) -> None:
            side.events.append(fields)
            timeline.record(event, **fields)

        report = SwapReport(Counters(), ProducerMetrics(CollectorRegistry()), record)
        side.registry = AdapterRegistry(loader, report)
        side.receiver = Receiver(asyncio.get_running_loop(), side.registry)
        transport = TransportSection()
        side.link = Link(
            Mailbox(ZmqClient("bench-1-aa", *endpoints, MAX_MESSAGE_BYTES)),
            Hello("bench-1-aa", ENGINE_FACTS, 1),
            transport,
            PolicySources("bench-1-aa", transport),
            side.receiver,
            Counters(),
            lambda: Workload((), 0, 0, 0.0),
        )
        side.link.start()
        _, first = await side.receiver.arrivals.get()
        assert await side.registry.publish(first), "the first version is refused"
        with_lora = engine.capabilities.holds_versions
        side.flips = _flips_of(engine.weights) if is_full else []
        side.traffic = Traffic(engine._core.llm, side.registry.pin, with_lora)
        side.streams = [asyncio.create_task(side.traffic.stream(number)) for number in range(_NUM_STREAMS)]
        side.streams.append(asyncio.create_task(side.registry.unload_released()))
        await side.traffic.flows.wait()
        await asyncio.sleep(_AROUND_S)
        return side

    async def swap(self) -> dict[str, Any]:
        """Publishes once, and says what happened when."""
        if self.way == WAYS[2]:
            times = await self._pause_and_load()
        else:
            times = await self._publish()
        live = time.monotonic()
        await asyncio.sleep(_AROUND_S)
        if self.is_full and self.way != WAYS[2]:
            times["gap_at_flip_s"] = max(self.traffic.gaps_between(*self.flips[-1]), default=0.0)
            times |= await self._of_last_load()
        began = times.pop("began")
        ordinary = self.traffic.gaps_between(began - _AROUND_S, began)
        before = self.traffic.pace(began - _AROUND_S, began)
        return times | {
            "live_s": live - began,
            "ordinary_gap_s": statistics.median(ordinary),
            "ordinary_longest_gap_s": max(ordinary),
            "longest_gap_s": max(self.traffic.gaps_between(began, live), default=0.0),
            "pace_before": before,
            "pace_after": self.traffic.pace(began, began + _AROUND_S),
        }

    async def _publish(self) -> dict[str, float]:
        if self.way == WAYS[4]:
            await self.engine._core.call_workers("prove_by_bits", False)
        command = "publish" if self.way in WAYS[:2] else "publish without probe"
        told = asyncio.create_task(asyncio.to_thread(_ask, self.pipe, command))
        arrived, downloaded = await self.receiver.arrivals.get()
        started = time.monotonic()
        assert await self.registry.publish(downloaded), "the version is refused"
        done = time.monotonic()
        if self.way == WAYS[4]:
            await self.engine._core.call_workers("prove_by_bits", True)
        times = await told
        return {
            "began": times["began"],
            "bytes": times["bytes"],
            "trainer_probe_s": times["probe_s"],
            "snapshot_s": times["snapshot_s"],
            "hash_s": times["hashed"] - times["taken"],
            "shelf_s": times["announced"] - times["hashed"],
            "transfer_s": max(0.0, arrived - times["announced"]),  # it may arrive before `publish` has returned there
            "load_and_prove_s": done - started,
        }

    async def _of_last_load(self) -> dict[str, float]:
        """Return the seconds of each phase, and the CPU's of both threads, for the last version."""
        phases = ("load", "prepare", "flip", "bits")
        event = self.events[-1]
        prepare, prove = (await self.engine._core.call_workers("cpu_s_of_threads"))[0][-2:]
        return {f"{name}_s": event[f"{name}_ms"] / 1e3 for name in phases} | {
            "prepare_cpu_s": prepare,
            "prove_cpu_s": prove,
        }

    async def _pause_and_load(self) -> dict[str, float]:
        path = self.folder / "saved"
        times = await asyncio.to_thread(_ask, self.pipe, str(path))
        saved = time.monotonic()
        adapter = Adapter(1, f"paused-{self.folder.name}", 10_000 + id(self) % 10_000, path)
        await self.engine._core.llm.pause_generation(mode="keep", clear_cache=False)
        if self.is_full:
            await self.engine._core.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        else:
            await self.engine.weights.load(adapter)
            self.paused = adapter
        await self.engine._core.llm.resume_generation()
        return {"began": times["began"], "save_s": saved - times["began"], "pause_and_load_s": time.monotonic() - saved}

    async def end(self) -> None:
        for stream in self.streams:
            stream.cancel()
        await asyncio.wait(self.streams)
        if hasattr(self, "paused"):
            await self.engine.weights.discard(self.paused)
        self.link.stop(0.0)
        await asyncio.to_thread(self.link.join)
        self.pipe.send("stop")
        await asyncio.to_thread(self.child.join)
        self.registry._flip(None)
        await self.registry.unload_idle()


def _flips_of(weights: Any) -> list[tuple[float, float]]:
    """Return a list to which the beginning and the end of each flip from now on are added."""
    found: list[tuple[float, float]] = []
    flip = type(weights)._flip

    async def timed(adapter: Adapter | None) -> None:
        began = time.monotonic()
        await flip(weights, adapter)
        found.append((began, time.monotonic()))

    weights._flip = timed
    return found


def _ask(pipe: Connection, command: str) -> Any:
    pipe.send(command)
    return pipe.recv()


def _build_model(folder: Path) -> Path:
    """25 M parameters and a small vocabulary: adapters are as large as for a model of billions."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.integration.models import char_tokenizer

    torch.manual_seed(0)
    tokenizer = char_tokenizer()
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = Qwen2Config(**shape, num_key_value_heads=4, vocab_size=len(tokenizer), bos_token_id=None)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _config(model: Path, scratch: Path, rank: int, mode: str, device: str) -> RunConfig:
    lora = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    return _run_config(model, scratch, DTYPES[device], device, lora=lora, swap={"mode": mode})


def _full_config(scratch: Path) -> RunConfig:
    TASKS["smollm2"].build()
    return _run_config(TASKS["smollm2"].base.absolute(), scratch, "bfloat16", "cpu", lora=None)


def _run_config(model: Path, scratch: Path, dtype: str, device: str, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(scratch),
            "model": {"path": str(model), "dtype": dtype},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"function": "unused:reward"}]},
            "sampling": {"num_generations": 4, "max_completion_length": _LENGTH},
            "engine": {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16} | ENGINE_SHARE[device],
            **sections,
        }
    )


def _print(swaps: list[dict[str, Any]]) -> None:
    print(f"{'MB':>4} {'way':<15} {'live ms':>8} {'gap ms':>7} {'ordinary':>9} {'tokens/s':>9}  quartiles of live")
    for (size, way), group in itertools.groupby(
        sorted(swaps, key=lambda one: (one["size_mb"], one["way"])), key=lambda one: (one["size_mb"], one["way"])
    ):
        rows = list(group)
        live = [1000 * row["live_s"] for row in rows]
        spread = statistics.quantiles(live, n=4) if len(live) > 1 else live
        gap, ordinary = (
            statistics.median(1000 * row[name] for row in rows) for name in ("longest_gap_s", "ordinary_gap_s")
        )
        pace = statistics.median(row["pace_after"] / max(1e-9, row["pace_before"]) for row in rows)
        print(
            f"{size:>4} {way:<15} {statistics.median(live):>8.0f} {gap:>7.0f} {ordinary:>9.0f} {pace:>8.0%}  "
            + " ".join(f"{value:.0f}" for value in spread)
        )


if __name__ == "__main__":
    main()
