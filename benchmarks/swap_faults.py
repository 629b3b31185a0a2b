"""`make bench-swap-faults`: faults of a swap, and after how many versions the proof by behaviour refuses each.

Guarantee: trainer's and engine's numbers are real. A model learns prompts of sums with AdamW, the product's probe measures each
version, and a real vLLM engine computes it: as it is, at half its alpha, without one kind of module, and another adapter in its
place. The base and the version before are what the engine has computed before. A stale prefix cache is an engine whose cache
does not tell versions apart. Each fault begins at the first version, and is judged by the product's proof of its own; versions
without a fault must all pass.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from consumer.link.probe import PolicyProbe, probe_rows
from consumer.link.snapshots import AdapterSnapshots
from producer.engine_contract import Adapter, Scored
from producer.metrics import Verdict
from producer.policies.probe import ReceivedProbe, SwapProof, probe_of
from protocol.config.run import RunConfig
from protocol.wire.adapter_blob import unpack
from protocol.wire.messages import PolicyOffer
from tests.integration.engines import run_config
from tests.integration.forked_cores import forked_cores

SHARES = ("base", "version before", "another adapter", "alpha 0.5", "no q_proj", "no down_proj", "stale prefix cache")
_RANK = 16
_BATCH = 4


class Learner:
    """The trainer's side: a model that learns, its probe and its snapshots."""

    def __init__(self, model: Path, dtype: str, lr: float, seed: int, mode: str) -> None:
        torch.manual_seed(seed)
        self._random = random.Random(seed)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        lora = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self._model = get_peft_model(base, lora).eval()
        texts = [f"Calculate {one} - {other}. Answer with one number. " for one in range(30) for other in range(one)]
        self._random.shuffle(texts)
        self._texts = texts
        rows = probe_rows([(text, {}) for text in texts], self._tokenizer, 0)
        merged = mode == "merged" and dtype != "float32"
        self._probe = PolicyProbe(rows, 1, self._model, contextlib.nullcontext, merged=merged)
        self._snapshots = AdapterSnapshots(self._model)
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=lr)

    def step(self) -> None:
        """Take a step on answers with random advantages, as a policy gradient does."""
        self._optimizer.zero_grad()
        for text in self._random.sample(self._texts, _BATCH):
            ids = self._tokenizer(text + str(self._random.randint(0, 99)), return_tensors="pt")["input_ids"]
            logprobs = self._model(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])
            (-self._random.choice((-1, 1)) * logprobs[:, -8:].mean() / _BATCH).backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()

    def publish(self, version: int) -> tuple[bytes, ReceivedProbe]:
        policy = self._snapshots.take(self._probe.measure(version)).published(version)
        probe = probe_of(PolicyOffer(policy.digest, "", policy.probe))
        assert probe is not None
        blob = bytes(policy.data)
        policy.release()
        return blob, probe


class Served:
    """The engine's side: adapters, as they are or with a fault, and what it computes of the probe."""

    def __init__(self, config: RunConfig, folder: Path, workers: int, *, is_stale: bool) -> None:
        from producer.engine.engine import VllmEngine
        from producer.engine.weights import MergedWeights

        with contextlib.ExitStack() as stack:
            stack.enter_context(forked_cores())
            if is_stale:
                stack.enter_context(one_cache())
            self._engine = VllmEngine(config, workers)
        self._weights = self._engine.weights
        if is_stale and config.swap.mode == "merged":
            MergedWeights.salt = property(lambda self: "weights")  # type: ignore[assignment,method-assign]
        self._folder = folder
        self._number = 0

    async def start(self) -> None:
        await self._engine.warm_up()

    async def computed(self, probe: ReceivedProbe, blob: bytes | None, fault: str = "") -> list[Scored]:
        if blob is None:
            return [await self._weights.verify(None, list(row)) for row in probe.rows]
        self._number += 1
        adapter = Adapter(self._number, f"v{self._number}", self._number, self._folder / f"v{self._number}")
        unpack(blob, None, adapter.path)
        spoil(adapter.path, fault)
        await self._weights.load(adapter)
        found = [await self._weights.verify(adapter, list(row)) for row in probe.rows]
        self._weights.activate(adapter)
        await self._weights.discard(adapter)
        return found

    def close(self) -> None:
        self._engine.shutdown()


def spoil(folder: Path, fault: str) -> None:
    """Change an adapter's files as a fault of serving would change what is computed."""
    from safetensors.torch import load_file, save_file

    if fault == "alpha 0.5":
        settings = json.loads((folder / "adapter_config.json").read_text())
        settings["lora_alpha"] /= 2
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    elif fault.startswith("no "):
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, tensor in tensors.items():
            if fault.removeprefix("no ") in name:
                tensor.zero_()
        save_file(tensors, folder / "adapter_model.safetensors")


@contextlib.contextmanager
def one_cache() -> Iterator[None]:
    """Let prefix caches of engines that begin within not tell adapters apart."""
    with mock.patch("vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys", return_value=[]):
        yield


class Judge:
    """A proof for each fault, and when it refused first."""

    def __init__(self, config: RunConfig, faults: tuple[str, ...]) -> None:
        make = partial(SwapProof, config.probe_tolerance, config.probe_slack)
        self._proofs = {fault: make() for fault in ("none", *faults)}
        self.refused: dict[str, tuple[int, str]] = {}
        self.healthy: list[Verdict] = []

    def begin(self, probe: ReceivedProbe, base: list[Scored]) -> None:
        for proof in self._proofs.values():
            proof.note_base(probe, base)

    def judge(self, version: int, probe: ReceivedProbe, served: dict[str, list[Scored]]) -> None:
        for fault, scored in served.items():
            if fault in self.refused:
                continue
            verdict = self._proofs[fault].verdict(probe, scored)
            if fault == "none":
                self.healthy.append(verdict)
            if verdict.refusal:
                self.refused[fault] = (version, verdict.refusal)


def described(judge: Judge) -> str:
    last = judge.healthy[-1]
    compared = [
        f"since {name}: moved {one.moved:.2g}, noise {one.noise:.2g}, lack {one.lack:.2f} of {one.bound:.2f}, "
        f"least {one.share:.2f}"
        for name, one in last.comparisons.items()
    ]
    refused = ", ".join(f"{fault} at v{when}" for fault, (when, _) in judge.refused.items())
    return "; ".join([f"apart {last.difference:.2g}", *compared, f"refused: {refused}"])


async def run(arguments: argparse.Namespace, lr: float, folder: Path) -> dict[str, Any]:
    engine = {"enforce_eager": True, "max_model_len": 192, "max_num_seqs": 8}
    lora = {"r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": "all-linear"}
    config = run_config(
        arguments.model, folder / "run", arguments.dtype, engine=engine, lora=lora, swap={"mode": arguments.mode}
    )
    learner, other = (Learner(arguments.model, arguments.dtype, lr, seed, arguments.mode) for seed in (0, 1))
    served = Served(config, folder, arguments.workers, is_stale=arguments.stale)
    faults = ("stale prefix cache",) if arguments.stale else SHARES[:-1]
    judge = Judge(config, faults)
    try:
        await served.start()
        blob, probe = learner.publish(0)
        base = await served.computed(probe, None)
        judge.begin(probe, base)
        before = base
        for version in range(1, arguments.versions + 1):
            for _ in range(arguments.steps):
                learner.step()
            blob, probe = learner.publish(version)
            now = await served.computed(probe, blob)
            found = {"none": now}
            if arguments.stale:
                found = {"none": [row._replace(sampled=[], rescored=[]) for row in now], "stale prefix cache": now}
            elif len(judge.refused) < len(faults) and not arguments.healthy:
                for _ in range(arguments.steps):
                    other.step()
                found |= {"base": base, "version before": before}
                found["another adapter"] = await served.computed(probe, other.publish(version)[0])
                for fault in faults[3:]:
                    if fault not in judge.refused:
                        found[fault] = await served.computed(probe, blob, fault)
            judge.judge(version, probe, found)
            print(f"v{version}: {described(judge)}", file=sys.stderr, flush=True)
            before = now
    finally:
        served.close()
        await asyncio.sleep(0.1)
    return {
        "lr": lr,
        "refused": judge.refused,
        "false_alarms": int("none" in judge.refused),
        "versions": arguments.versions,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: a small random model)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--mode", choices=("adapter", "merged"), default="adapter", help="swap.mode")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (tensor parallel)")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 5e-5, 2e-4])
    parser.add_argument("--versions", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a version")
    parser.add_argument("--stale", action="store_true", help="the stale prefix cache, in place of the other faults")
    parser.add_argument("--healthy", action="store_true", help="no fault: count false alarms")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/swap_faults.jsonl"), help="file to append to")
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for lr in arguments.lr:
        with tempfile.TemporaryDirectory(prefix="bench-faults-") as scratch:
            if arguments.model is None:
                from tests.integration.models import build_model

                arguments.model = build_model("llama", Path(scratch) / "model", num_layers=4)
            began = time.monotonic()
            result = asyncio.run(run(arguments, lr, Path(scratch)))
        line = {name: str(value) for name, value in vars(arguments).items()} | result
        with arguments.out.open("a") as stream:
            stream.write(json.dumps(line | {"seconds": round(time.monotonic() - began)}) + "\n")
        print(json.dumps(line["refused"], indent=1))


if __name__ == "__main__":
    main()
