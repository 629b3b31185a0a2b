"""What ranks say to one another in a step and how it grows with their number: measured on one machine, and on paper to 64 ranks.

    python -m benchmarks.rank_limits [--worlds 2,4,8,16,32]

Guarantee: the exchanges are those of the product, over gloo on loopback, for 8 completions of 512 tokens per rank: the plan, the
values of all tokens that metrics are made of, four numbers of each rank, and a piece of a checkpoint. Where there are more
processes than cores, time on the wall says something about the machine; so what is reported is also the processor time of a rank.
What every rank computes of the whole batch is measured up to 64 ranks. The all-reduce is arithmetic: a ring moves 2 (W - 1) / W
of the gradients over each link, in 2 (W - 1) turns.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import socket
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.balance import MAX_TOKENS, log_normal
from benchmarks.groups import SHAPE, GroupFactory
from consumer.batches.balance import shares
from consumer.ranks.exchange import ProcessRanks, Ranks
from consumer.ranks.plan import PIECE_BYTES, Piece, Train, decode, encode
from replay.batches.cutting import CutBatch

VALUES_PER_TOKEN = 10  # that metrics of `loss_type: dapo` are made of
ON_PAPER = (8, 16, 64)
_REPETITIONS = 5


class Link(NamedTuple):
    bytes_per_s: float  # in one direction, as all-reduces reach it
    turn_s: float


LINKS = {
    "NVLink 4, 350 GB/s, 5 us": Link(350e9, 5e-6),
    "400 Gbit/s, 45 GB/s, 10 us": Link(45e9, 10e-6),
    "100 Gbit/s, 11 GB/s, 30 us": Link(11e9, 30e-6),
    "10 Gbit/s, 1.1 GB/s, 50 us": Link(1.1e9, 50e-6),
}
SIZES_MB = (20, 80, 320, 1280)


def ring_s(size_bytes: float, world: int, link: Link) -> float:
    """Of an all-reduce."""
    return 2 * (world - 1) / world * size_bytes / link.bytes_per_s + 2 * (world - 1) * link.turn_s


def batch_of(world: int) -> CutBatch:
    """A group for each rank."""
    factory = GroupFactory(0)
    groups = [SHAPE.load(factory.frame(str(number))) for number in range(world)]
    return CutBatch(0, 1, 1, groups, len(groups))


def exchanges(ranks: Ranks) -> dict[str, Callable[[], object]]:
    tokens = SHAPE.num_generations * SHAPE.max_completion_length
    values = {str(number): torch.rand(tokens) for number in range(VALUES_PER_TOKEN)}
    batch, is_first = batch_of(ranks.world), ranks.rank == 0
    piece = Piece(bytes(PIECE_BYTES)) if is_first else None
    return {
        "four numbers": lambda: ranks.gather({"work": torch.ones(4)}),
        "values of tokens": lambda: ranks.gather(values),
        "plan": lambda: ranks.share(Train.of(batch) if is_first else None),
        "64 MiB of checkpoint": lambda: ranks.share(piece),
    }


def of_rank(port: int, rank: int, world: int, result: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    ranks = ProcessRanks(store, rank, world, torch.device("cpu"), 600.0)
    found = {name: _timed(exchange, ranks) for name, exchange in exchanges(ranks).items()}
    ranks.gather({"ready": torch.ones(1)})
    result.send(found)


def _timed(exchange: Callable[[], object], ranks: Ranks) -> dict[str, float]:
    walls, busy = list[float](), list[float]()
    for _ in range(_REPETITIONS + 1):
        ranks.gather({"ready": torch.ones(1)})
        began, used = time.perf_counter(), _processor_s()
        exchange()
        walls.append(time.perf_counter() - began)
        busy.append(_processor_s() - used)
    return {"wall_s": statistics.median(walls[1:]), "busy_s": statistics.median(busy[1:])}


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure_exchanges(world: int) -> dict[str, dict[str, float]]:
    """Of the slowest rank, and of the median one. Ranks are forks, so that they need not import torch anew."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [context.Process(target=of_rank, args=(port, rank, world, pipes[rank][1])) for rank in range(world)]
    for process in processes:
        process.start()
    found = [receive.recv() for receive, _ in pipes]
    for process in processes:
        process.join()
    return {
        name: {
            "wall_s": max(each[name]["wall_s"] for each in found),
            "busy_s": statistics.median(each[name]["busy_s"] for each in found),
            "busy_of_rank_0_s": found[0][name]["busy_s"],
        }
        for name in found[0]
    }


def measure_own_work(world: int) -> dict[str, float]:
    """What each rank does with the whole batch before it trains its share, in seconds of the processor; and the plan's bytes."""
    batch = batch_of(world)
    frame = encode(Train.of(batch))
    lengths = log_normal(1.0)(np.random.default_rng(0), SHAPE.num_generations * world)
    works: dict[str, Callable[[], object]] = {
        "encode_s": lambda: encode(Train.of(batch)),
        "decode_s": lambda: _decoded(frame),
        "deal_out_s": lambda: shares(lengths, MAX_TOKENS, padded=True, world=world),
    }
    found = {name: statistics.median(_busy(work) for _ in range(_REPETITIONS)) for name, work in works.items()}
    return found | {"plan_bytes": float(len(frame))}


def _decoded(frame: bytes) -> CutBatch:
    plan = decode(frame)
    assert isinstance(plan, Train)
    return plan.batch(SHAPE)


def _busy(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", default="2,4,8,16,32", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/rank_limits.json"), help="JSON file to write")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    worlds = [int(world) for world in options.worlds.split(",")]
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": os.getloadavg(),
        "exchanges": {world: measure_exchanges(world) for world in worlds},
        "own_work": {world: measure_own_work(world) for world in sorted({*worlds, 64})},
        "all_reduce_s": {
            name: {size: [ring_s(size * 1e6, world, link) for world in ON_PAPER] for size in SIZES_MB}
            for name, link in LINKS.items()
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    _print(report)


def _print(report: dict[str, Any]) -> None:
    for world, found in report["exchanges"].items():
        print(f"{world} processes, ms on the wall; of the processor, of a rank and of rank 0")
        for name, times in found.items():
            print(f"  {name:24}{'  '.join(f'{value * 1e3:9.2f}' for value in times.values())}")
    for world, work in report["own_work"].items():
        ms = {name: f"{work[f'{name}_s'] * 1e3:.1f} ms" for name in ("encode", "decode", "deal_out")}
        print(f"{world} ranks: a plan of {work['plan_bytes'] / 1e6:.2f} MB, {ms}")
    print(f"all-reduce on paper, ms, with {ON_PAPER} ranks")
    for name, sizes in report["all_reduce_s"].items():
        print(f"  {name:28}", {f"{size} MB": [round(s * 1e3, 1) for s in times] for size, times in sizes.items()})


if __name__ == "__main__":
    main()
