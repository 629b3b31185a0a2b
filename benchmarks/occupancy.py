"""How many sequences an engine runs, of those that it has places for, where groups enter through the producer's admission.

    python -m benchmarks.occupancy [--out FILE] [--groups 4 8 16 32] [--mean 40] [--blocks N]

Guarantee: vLLM's engine and scheduler, the producer's configuration of them and its `Admission` are the real ones. The model is
tiny, on a CPU, and the producer acts between two steps, so that other work on the machine changes nothing. A completion has a
length that was drawn before. The steps that the first groups take are not counted. `whole` admits groups as if their completions
ended together, `running` as a producer does.
"""

import argparse
import asyncio
import itertools
import json
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.made_on import made_on

PLACES, PROMPT, LONGEST = 256, 64, 400
WARM_STEPS, STEPS = 150, 250
LENGTHS = ("geometric", "log-normal 0.5", "log-normal 1")
_TICKS = 12  # of the event loop, in which a group comes from the door to the engine


def draw(lengths: str, mean: float, rng: np.random.Generator) -> int:
    """Draw a length from a distribution that is called as in `LENGTHS`, where the number is the sigma of the logarithm."""
    if lengths == "geometric":
        drawn = float(rng.geometric(1.0 / mean))
    else:
        sigma = float(lengths.split()[1])
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma)
    return int(np.clip(np.rint(drawn), 1, LONGEST))


@dataclass
class Engine:
    """vLLM in this process, which takes a step when it is told to."""

    llm: Any
    recorder: Any
    numbers: Any = field(default_factory=itertools.count)
    ended: dict[str, "asyncio.Future[None]"] = field(default_factory=dict)

    def load(self) -> Any:
        running = self.recorder.load.running
        return replace(self.recorder.load, waiting=max(0, self.llm.get_num_unfinished_requests() - running))

    async def sample(self, prompt: list[int], length: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
        request_id = f"{next(self.numbers)}"
        self.ended[request_id] = asyncio.get_running_loop().create_future()
        self.llm.add_request(request_id, {"prompt_token_ids": prompt}, params)
        try:
            await self.ended[request_id]
        finally:
            del self.ended[request_id]
            self.llm.abort_request([request_id])

    def step(self) -> None:
        for output in self.llm.step():
            if output.finished and not self.ended[output.request_id].done():
                self.ended[output.request_id].set_result(None)


def started(folder: Path, group_size: int, blocks: int) -> Engine:
    from vllm.v1.engine.llm_engine import LLMEngine

    from producer.engine.configuration import build_vllm_config, model_folder, take_places
    from producer.engine.engine import _LoadRecorder
    from tests.integration.engines import run_config

    limits = {
        "max_num_seqs": PLACES, "max_model_len": 512, "enforce_eager": True, "num_gpu_blocks_override": blocks,
        "block_size": 32,
    }  # fmt: skip
    config = run_config(folder, folder / "run", sampling={"num_generations": group_size}, engine=limits)
    vllm_config = build_vllm_config(config, model_folder(config), 0)
    take_places(vllm_config, group_size)
    recorder = _LoadRecorder()
    return Engine(LLMEngine.from_vllm_config(vllm_config, stat_loggers=[lambda *_: recorder]), recorder)


async def measure(engine: Engine, rule: str, lengths: str, group_size: int, mean: float) -> dict[str, Any]:
    """Return the means over the measured steps."""
    from producer.engine_contract import most_groups
    from producer.rollouts.admission import Admission

    class Whole(Admission):
        def _fits(self, num_more: int) -> bool:
            return False

    ceiling = most_groups(PLACES, group_size)
    admission = (Admission if rule == "running" else Whole)(ceiling, group_size, engine.load)
    rng, completions = np.random.default_rng(0), 0

    async def work() -> None:
        nonlocal completions
        while True:
            async with admission.place() as place, place.use(group_size), asyncio.TaskGroup() as samples:
                prompt = [7] * 16 + rng.integers(4, 40, PROMPT - 16).tolist()
                for _ in range(group_size):
                    samples.create_task(engine.sample(prompt, draw(lengths, mean, rng)))
            completions += group_size

    workers = [asyncio.create_task(work()) for _ in range(6 * ceiling)]
    rows = []
    for _ in range(WARM_STEPS + STEPS):
        for _ in range(_TICKS):
            await asyncio.sleep(0)
        engine.step()
        admission.note_load()
        load = engine.recorder.load
        rows.append((load.running, load.waiting, len(admission._inside), load.preemptions, completions))
    for worker in workers:
        worker.cancel()
    for outcome in await asyncio.gather(*workers, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            raise RuntimeError("a group failed") from outcome
    engine.step()  # without them
    rows, places = rows[WARM_STEPS:], ceiling * group_size
    running, waiting, inside = (round(fmean(row[column] for row in rows), 1) for column in range(3))
    preemptions, ended = (rows[-1][column] - rows[0][column] for column in (3, 4))
    return {
        "rule": rule, "lengths": lengths, "group_size": group_size, "places": places, "running": running,
        "share": round(running / places, 3), "waiting": waiting, "groups": inside, "completions": ended,
        "preemptions_per_completion": round(preemptions / max(1, ended), 3), "limit": admission.limit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS))
    parser.add_argument("--mean", type=float, default=40.0)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4096], help="of the KV cache, of 32 tokens")
    arguments = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made, rows = made_on(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        from tests.integration.models import build_model

        folder = build_model("qwen2", Path(name) / "model")
        for group_size, blocks in itertools.product(arguments.groups, arguments.blocks):
            engine = started(folder, group_size, blocks)
            for lengths, rule in itertools.product(arguments.lengths, ("whole", "running")):
                rows.append(
                    {"blocks": blocks} | asyncio.run(measure(engine, rule, lengths, group_size, arguments.mean))
                )
                print(json.dumps(rows[-1]), flush=True)
            engine.llm.engine_core.shutdown()
    if arguments.out:
        text = json.dumps(made | {"mean_length": arguments.mean, "rows": rows}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
