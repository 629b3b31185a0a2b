"""`make bench-swap-faults`: faults of a swap, and after how many versions each proof refuses each.

Guarantee: trainer's and engine's numbers are real. A model learns prompts of sums with AdamW, the product's probe measures each
version, and a real vLLM engine computes it. The proof by bits sees faults of a worker, which holds other numbers than the files
do. The proof by behaviour sees files that are wrong already, with which the bits agree: half of alpha, no numbers of one kind of
module, another adapter; the base and the version before are what the engine has computed before. A stale prefix cache is an
engine whose cache does not tell versions apart. Each fault begins at the first version, and is judged by a proof of its own;
versions without a fault must pass both.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.made_on import made_on
from consumer.link.probe import PolicyProbe, probe_rows
from consumer.link.snapshots import AdapterSnapshots
from producer.engine.own_arguments import own_arguments
from producer.engine_contract import Adapter, AdapterRefusedError, Scored
from producer.metrics import Verdict
from producer.policies.probe import ReceivedProbe, SwapProof, probe_of
from protocol.config.run import RunConfig
from protocol.runtime import json_lines
from protocol.wire.adapter_blob import unpack
from protocol.wire.messages import PolicyOffer
from slipstream_extras.engine_server.engine import server_engine
from tests.integration.engines import run_config
from tests.integration.faulty_workers import FILE
from tests.integration.forked_cores import forked_cores
from tests.integration.vllm_server import VllmServer

FAULTS = {
    "base": "the base is served",
    "version before": "another adapter is held",
    "another adapter": "another adapter is held",
    "alpha 0.5": "alpha is halved",
    "no q_proj": "q_proj is missing",
    "no down_proj": "down_proj is missing",
}
"""What a worker does, for the proof by bits."""
STALE = "stale prefix cache"
PROOFS = ("bits", "behaviour")
_RANK = 16
_BATCH = 4
_LENGTH = 192


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

    def __init__(self, weights: Any, folder: Path) -> None:
        self._weights = weights
        self._folder = folder
        self._number = 0

    async def computed(self, probe: ReceivedProbe, blob: bytes | None, fault: str = "") -> list[Scored]:
        """Return what the engine computes with this policy (None: its base), whose files have this fault."""
        if blob is None:
            return await self._weights.verify(None, probe.rows)
        adapter = self._unpacked(blob)
        if fault:
            spoil(adapter.path, fault)
            adapter = replace(adapter, checksum=None)
        await self._weights.load(adapter)
        found = await self._weights.verify(adapter, probe.rows)
        self._weights.activate(adapter)
        await self._weights.discard(adapter)
        return found

    async def is_refused(self, blob: bytes, fault: str, other: bytes) -> bool:
        """Load this policy with a fault of the workers, which may hold another one in its place."""
        adapter = self._unpacked(blob)
        (adapter.path / FILE).write_text(f"{FAULTS[fault]}\n{self._unpacked(other).path}")
        try:
            await self._weights.load(adapter)
        except AdapterRefusedError:
            return True
        self._weights.activate(adapter)
        await self._weights.discard(adapter)
        return False

    def _unpacked(self, blob: bytes) -> Adapter:
        self._number += 1
        path = self._folder / f"v{self._number}"
        return Adapter(self._number, f"v{self._number}", self._number, path, unpack(blob, None, path))


async def serve(stack: AsyncExitStack, arguments: argparse.Namespace, config: RunConfig, folder: Path) -> Served:
    """Start the engine: in processes of our own, with workers that have faults, or a vLLM server."""
    engine: Any
    if arguments.server:
        engine = await stack.enter_async_context(server_engine(config))
    else:
        from producer.engine.engine import VllmEngine

        faulty = "FaultyMerging" if config.swap.mode == "merged" else "FaultyLoading"
        extension = {"worker_extension_cls": f"tests.integration.faulty_workers.{faulty}"}
        changed = mock.patch(
            "producer.engine.configuration.own_arguments", lambda *given: own_arguments(*given) | extension
        )
        cores = "|".join(str(worker % (os.cpu_count() or 1)) for worker in range(arguments.workers))
        bound = {"VLLM_CPU_OMP_THREADS_BIND": cores} if arguments.workers > 1 else {}  # no NUMA node for each here
        cache = one_cache(config.swap.mode) if arguments.stale else contextlib.nullcontext()
        with forked_cores(), changed, cache, mock.patch.dict("os.environ", bound):
            engine = VllmEngine(config, arguments.workers)
        stack.push_async_callback(asyncio.sleep, 0.1)
        stack.callback(engine.shutdown)
    await engine.warm_up()
    return Served(engine.weights, folder)


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
def one_cache(mode: str) -> Iterator[None]:
    """Let prefix caches of engines that begin within not tell adapters apart, and all merged weights have one salt."""
    if mode == "merged":
        from producer.engine.weights import MergedWeights

        MergedWeights.salt = property(lambda self: "weights")  # type: ignore[assignment,method-assign]
    with mock.patch("vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys", return_value=[]):
        yield


class Judge:
    """A proof by behaviour for each fault, and at which version each proof refused first."""

    def __init__(self, config: RunConfig, faults: tuple[str, ...]) -> None:
        make = partial(SwapProof, config.probe_tolerance, config.probe_slack)
        self._proofs = {fault: make() for fault in ("none", *faults)}
        self.by_bits: dict[str, int] = {}
        self.by_behaviour: dict[str, int] = {}
        self.verdicts: dict[str, Verdict] = {}  # the last one of each fault

    def begin(self, probe: ReceivedProbe, base: list[Scored]) -> None:
        for proof in self._proofs.values():
            proof.note_base(probe, base)

    def judge(self, version: int, probe: ReceivedProbe, served: dict[str, list[Scored]]) -> None:
        for fault, scored in served.items():
            if fault in self.by_behaviour:
                continue
            self.verdicts[fault] = self._proofs[fault].verdict(probe, scored)
            if self.verdicts[fault].refusal:
                self.by_behaviour[fault] = version

    def found(self) -> dict[str, Any]:
        """Return when what was refused, the least lack that would be now, and how much each fault lacks of the move since the
        base."""
        least = min((one.share for one in self.verdicts["none"].comparisons.values()), default=float("inf"))
        lacks = {
            fault: round(verdict.comparisons["base"].lack, 3)
            for fault, verdict in self.verdicts.items()
            if "base" in verdict.comparisons
        }
        return {
            "by_bits": self.by_bits,
            "by_behaviour": self.by_behaviour,
            "false_alarms": int("none" in self.by_behaviour),
            "least_lack": round(least, 3),
            "lacks": lacks,
            "reasons": {fault: self.verdicts[fault].refusal for fault in self.by_behaviour},
        }


def described(judge: Judge) -> str:
    last = judge.verdicts["none"]
    compared = [
        f"since {name}: moved {one.moved:.2g}, noise {one.noise:.2g}, lack {one.lack:.2f} of {one.bound:.2f}, "
        f"least {one.share:.2f}"
        for name, one in last.comparisons.items()
    ]
    return "; ".join(
        [f"apart {last.difference:.2g}", *compared, f"bits: {judge.by_bits}, behaviour: {judge.by_behaviour}"]
    )


async def compare(arguments: argparse.Namespace, lr: float, served: Served, judge: Judge, base: Any) -> Any:
    """Train at this rate, and judge each version and its faults. Return what the engine's base computes (`base`, if it was asked
    before)."""
    seeds = (arguments.seed, arguments.seed + 1)
    learner, other = (Learner(arguments.model, arguments.dtype, lr, seed, arguments.mode) for seed in seeds)
    blob, probe = learner.publish(0)
    before_blob, before = blob, (base := base or await served.computed(probe, None))
    judge.begin(probe, base)
    for version in range(1, arguments.versions + 1):
        for each in (learner, other):
            for _ in range(arguments.steps if each is learner or not arguments.healthy else 0):
                each.step()
        blob, probe = learner.publish(version)
        now = await served.computed(probe, blob)
        found = {"none": now}
        if arguments.stale:
            found = {"none": [row._replace(sampled=[], rescored=[], cached=0) for row in now], STALE: now}
        elif not arguments.healthy:
            other_blob, _ = other.publish(version)
            if "bits" in arguments.proof:
                for fault in FAULTS.keys() - judge.by_bits.keys():
                    wrong = before_blob if fault == "version before" else other_blob
                    if await served.is_refused(blob, fault, wrong):
                        judge.by_bits[fault] = version
            if "behaviour" in arguments.proof:
                found |= {"base": base, "version before": before}
                for fault in (*FAULTS,)[2:]:
                    if fault not in judge.by_behaviour:
                        wrong = other_blob if fault == "another adapter" else blob
                        found[fault] = await served.computed(probe, wrong, fault)
        judge.judge(version, probe, found)
        print(f"{lr:g} v{version}: {described(judge)}", file=sys.stderr, flush=True)
        before_blob, before = blob, now
    return base


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    sections: dict[str, Any] = {"engine": {"enforce_eager": True, "max_model_len": _LENGTH, "max_num_seqs": 8}}
    async with AsyncExitStack() as stack:
        if arguments.server:
            server = VllmServer(
                arguments.model, folder, stack.enter_context(ExitStack()), arguments.dtype, _LENGTH, _RANK
            )
            section = {"url": server.url, "adapter_dir": str(folder / "shared"), "answer_timeout_s": 120.0}
            sections = {"engine": {}, "engine_server": section}
            await asyncio.to_thread(server.wait_until_ready)
        lora = {"r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": "all-linear"}
        swap = {"mode": arguments.mode}
        config = run_config(arguments.model, folder / "run", arguments.dtype, lora=lora, swap=swap, **sections)
        served = await serve(stack, arguments, config, folder)
        base = None
        for lr in arguments.lr:
            judge, began = Judge(config, (STALE,) if arguments.stale else (*FAULTS,)), time.monotonic()
            made = made_on()
            base = await compare(arguments, lr, served, judge, base)
            asked = {name: str(value) for name, value in vars(arguments).items() if name != "out"}
            line = asked | {"lr": lr} | judge.found() | {"seconds": round(time.monotonic() - began)} | made
            with arguments.out.open("a") as stream:
                stream.write(json_lines.encode_line(line) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: a small random model)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--mode", choices=("adapter", "merged"), default="adapter", help="swap.mode")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (tensor parallel)")
    parser.add_argument("--server", action="store_true", help="a vLLM server, whose bits cannot be read")
    parser.add_argument("--proof", choices=PROOFS, nargs="+", default=PROOFS, help="what judges faults")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 5e-5, 2e-4])
    parser.add_argument("--versions", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the learner; the other adapter has the next one")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a version")
    parser.add_argument("--stale", action="store_true", help="the stale prefix cache, in place of the other faults")
    parser.add_argument("--healthy", action="store_true", help="no fault: count false alarms")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/swap_faults.jsonl"), help="file to append to")
    arguments = parser.parse_args(argv)
    if arguments.server:
        arguments.proof = ["behaviour"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as scratch:
        if arguments.model is None:
            from tests.integration.models import build_model

            arguments.model = build_model("llama", Path(scratch) / "model", num_layers=4)
        asyncio.run(run(arguments, Path(scratch)))


if __name__ == "__main__":
    main()
