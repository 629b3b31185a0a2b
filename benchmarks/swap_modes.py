"""What a policy costs while it is served, and while it is swapped: `python -m benchmarks.swap_modes`, or `make bench-swap-modes`.

Guarantee: three real engines of the same model (without any adapter, with `swap.mode: adapter`, with `swap.mode: merged`) take
turns burst by burst, and who goes first changes every time, so that whatever else the machine does falls on all of them. CPU
time of the engine's own process is measured beside wall time; it hardly depends on what else runs.
Gaps are seen from outside, by one more request whose tokens are streamed.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.groups import DTYPES, ENGINE_SHARE
from benchmarks.made_on import made_on
from producer.engine_contract import Adapter
from protocol.config.run import RunConfig
from protocol.wire.messages import Sampling

MODELS: dict[str, dict[str, int]] = {
    "0.6M": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "vocab_size": 1024,
        "num_attention_heads": 4,
    },
    "20M": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "vocab_size": 4096,
        "num_attention_heads": 8,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "vocab_size": 151936,
        "num_attention_heads": 14,
    },
}
_OF_DEVICE = {"cpu": ["0.6M", "20M"], "cuda": ["0.5B"]}
ARMS = ("plain", "adapter", "merged")
GROUP = 8
RANK = 16
STREAM_TOKENS = 1024
_UNKNOWN, _END = "t0", "t1"


def build(folder: Path, shape: dict[str, int]) -> None:
    """A random model, and two adapters of it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = Tokenizer(
        models.WordLevel({f"t{index}": index for index in range(shape["vocab_size"])}, unk_token=_UNKNOWN)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=_UNKNOWN, eos_token=_END).save_pretrained(
        folder / "model"
    )
    config = Qwen2Config(
        **shape,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        max_position_embeddings=2048,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder / "model")
    lora = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    for number in (1, 2):
        with torch.no_grad():
            for name, parameter in lora.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.02)
        lora.save_pretrained(folder / f"adapter-{number}")


def run_config(folder: Path, mode: str, device: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "model": {"path": str(folder / "model"), "dtype": DTYPES[device]},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"function": "unused:reward"}]},
            "sampling": {"num_generations": GROUP},
            "swap": {"mode": mode},
            "lora": {"r": RANK, "lora_alpha": 2 * RANK},
            "engine": {"enforce_eager": device == "cpu", "max_model_len": 2048, "max_num_seqs": 264}
            | ENGINE_SHARE[device],
        }
    )


class Arm:
    """One engine, and how it samples."""

    def __init__(self, name: str, folder: Path, device: str) -> None:
        from producer.engine.engine import VllmEngine

        self.name = name
        self._folder = folder
        self._number = 0
        others = set(psutil.Process().children(recursive=True))
        self._engine = VllmEngine(run_config(folder, "adapter" if name == "adapter" else "merged", device), 0)
        self._processes = set(psutil.Process().children(recursive=True)) - others

    def cpu_s(self) -> float:
        """Spent so far by the engine core."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    async def start(self) -> None:
        if self.name != "plain":  # that one is left as vLLM makes it
            await self._engine.warm_up()
            await self.swap()

    async def swap(self) -> float:
        """To the other adapter; returns the seconds until requests can begin on it."""
        started = time.perf_counter()
        former, self._number = self._number, self._number + 1
        self.adapter = self._adapter(self._number)
        await self._engine.weights.load(self.adapter)
        self._engine.weights.activate(self.adapter)
        spent_s = time.perf_counter() - started
        if self.name == "adapter" and former > 1:  # the one before may still be named
            await self._engine.weights.discard(self._adapter(former - 1))
        return spent_s

    def _adapter(self, number: int) -> Adapter:
        return Adapter(number, f"v{number}", number, self._folder / f"adapter-{1 + number % 2}")

    async def group(self, prompt: list[int], length: int) -> int:
        """Samples one; returns how many tokens."""
        sampling = Sampling(GROUP, length, 1.0)
        if self.name != "plain":
            completions: list[Any] = await self._engine.generate(prompt, sampling, self.adapter)
        else:
            completions = await self._plain(prompt, sampling)
        return sum(len(completion.token_ids) for completion in completions)

    async def _plain(self, prompt: list[int], sampling: Sampling) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=sampling.num_generations,
            max_tokens=sampling.max_completion_length,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._number += 1
        request = await self._engine._core.llm.add_request(
            f"plain-{self._number}", {"type": "token", "prompt_token_ids": prompt}, params
        )
        return (await request.get()).outputs

    async def stream(self) -> list[float]:
        """The time of each token of one long request."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=STREAM_TOKENS, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        lora = (
            LoRARequest(self.adapter.name, self.adapter.id, str(self.adapter.path)) if self.name == "adapter" else None
        )
        prompt = {"type": "token", "prompt_token_ids": [2, 3, 4]}
        stream = self._engine._core.llm.generate(prompt, params, f"stream-{time.monotonic_ns()}", lora_request=lora)
        return [time.perf_counter() async for _ in stream]

    def close(self) -> None:
        self._engine.shutdown()


async def tokens_per_s(arm: Arm, num_requests: int, length: int) -> tuple[float, float]:
    """Of wall time, and of the engine's CPU time."""
    started, cpu_started = time.perf_counter(), arm.cpu_s()
    prompts = [[2 + index % 97, 3 + index % 89, 5 + index % 83, 7] for index in range(num_requests // GROUP)]
    counts = await asyncio.gather(*(arm.group(prompt, length) for prompt in prompts))
    return sum(counts) / (time.perf_counter() - started), sum(counts) / (arm.cpu_s() - cpu_started)


async def gaps(arm: Arm, num_requests: int) -> dict[str, float]:
    """Between the tokens of one request among many, while policies are swapped and while they are not."""
    stop = asyncio.Event()
    swapped: list[tuple[float, float]] = []

    async def load(index: int) -> None:
        while not stop.is_set():
            await arm.group([2 + index, 3, 5, 7], 256)

    workers = [asyncio.create_task(load(index)) for index in range(num_requests // GROUP)]
    await asyncio.sleep(0.5)
    stream = asyncio.create_task(arm.stream())
    while not stream.done():
        await asyncio.sleep(0.4)
        if not stream.done():
            spent_s = await arm.swap()
            swapped.append((time.perf_counter() - spent_s, spent_s))
    stop.set()
    times = await stream
    await asyncio.gather(*workers)
    return report(times, swapped)


def report(times: list[float], swapped: list[tuple[float, float]]) -> dict[str, float]:
    """Of the times of tokens, and of the begin and length of swaps; a gap belongs to a swap that it overlaps."""
    steps = list(itertools.pairwise(times))
    inside = [(began, spent_s) for began, spent_s in swapped if times[0] < began and began + spent_s < times[-1]]
    near = [
        max(after - before for before, after in steps if before < began + spent_s and after > began)
        for began, spent_s in inside
    ]
    apart = [
        after - before
        for before, after in steps
        if all(before >= began + spent_s or after <= began for began, spent_s in swapped)
    ]
    return {
        "swaps": len(inside),
        "swap_ms": statistics.median(spent_s for _, spent_s in swapped) * 1e3,
        "step_ms": statistics.median(after - before for before, after in steps) * 1e3,
        "longest_gap_at_a_swap_ms": statistics.median(near) * 1e3,
        "longest_gap_of_all_swaps_ms": max(near) * 1e3,
        "longest_gap_elsewhere_ms": max(apart) * 1e3,
    }


async def measure(arms: list[Arm], loads: list[int], rounds: int, length: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for num_requests in loads:
        speeds: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
        for index in range(rounds + 1):
            for arm in arms[index % 3 :] + arms[: index % 3]:
                speed = await tokens_per_s(arm, num_requests, length)
                if index:  # the first round warms up
                    speeds[arm.name].append(speed)
        result[f"{num_requests} requests"] = {
            name: {
                "tokens_per_s": statistics.median(wall for wall, _ in values),
                "tokens_per_cpu_s": statistics.median(cpu for _, cpu in values),
                **{
                    f"share_of_plain_{unit}": statistics.quantiles(
                        (mine[place] / plain[place] for mine, plain in zip(values, speeds["plain"], strict=True)), n=4
                    )
                    for place, unit in enumerate(("wall", "cpu"))
                },
            }
            for name, values in speeds.items()
        }
    result["gaps"] = {arm.name: await gaps(arm, loads[0]) for arm in arms if arm.name != "plain"}
    return result


async def run(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), MODELS[model])
        arms = [Arm(name, Path(folder), arguments.device) for name in ARMS]
        try:
            for arm in arms:
                await arm.start()
            return await measure(arms, arguments.requests, arguments.rounds, arguments.length)
        finally:
            for arm in arms:
                arm.close()
            await asyncio.sleep(0.1)


def show(model: str, result: dict[str, Any]) -> None:
    for name, row in result.items():
        if name == "gaps":
            continue
        for arm, values in row.items():
            shares = "  ".join(
                f"{unit} {middle:.3f} ({low:.3f} to {high:.3f})"
                for unit in ("wall", "cpu")
                for low, middle, high in [values[f"share_of_plain_{unit}"]]
            )
            print(
                f"{model:5} {name:13} {arm:8} {values['tokens_per_s']:8.0f} tok/s {values['tokens_per_cpu_s']:8.0f} tok per "
                f"CPU second; of plain: {shares}"
            )
    for arm, row in result["gaps"].items():
        print(f"{model:5} swaps, {arm:8} " + "  ".join(f"{key} {value:.1f}" for key, value in row.items()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(DTYPES), default="cpu", help="cuda: bfloat16, with CUDA graphs")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="(default: by the device)")
    parser.add_argument("--requests", nargs="+", type=int, default=[64, 256], help="at a time")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/swap_modes.json"))
    arguments = parser.parse_args(argv)
    made, results = made_on(), {}
    for model in arguments.models or _OF_DEVICE[arguments.device]:
        results[model] = asyncio.run(run(model, arguments))
        show(model, results[model])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(made | results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
