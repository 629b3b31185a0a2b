"""The trainer of `benchmarks.swap`: a model whose adapter changes, and everything that publishes it, in a process of its own.

Guarantee: snapshots, probe, publisher, store, intake and sockets are the product's. Times are of the monotonic clock, which all
processes of a host share.
"""

import contextlib
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.acceptor import Acceptor
from benchmarks.groups import DTYPES, MAX_MESSAGE_BYTES
from consumer.learn.model import save_weights
from consumer.link.policy_store import PublishedPolicy
from consumer.link.probe import NUM_ROWS, ROW_LENGTH, PolicyProbe
from consumer.link.publisher import Publisher
from consumer.link.snapshots import AdapterSnapshots
from consumer.link.weight_snapshots import WeightSnapshots
from consumer.waiting import WaitPolicy
from protocol.channel.server import ZmqServer
from protocol.runtime.scratch import NO_MEMORY, SharedMemory, shared_memory

PROBE_ROWS = 3 + np.arange(NUM_ROWS * ROW_LENGTH, dtype=np.int32).reshape(NUM_ROWS, -1) % 40


class Trainer(Acceptor):
    """Publishes a version whenever it is told to."""

    def __init__(
        self, channel: ZmqServer, folder: Path, model: Any, memory: SharedMemory, rate: float | None = None
    ) -> None:
        """Train all weights of `model`, by `rate` at a time, without a probe; None: it is a PeftModel."""
        super().__init__(channel, folder, memory)
        self._model, self._rate = model, rate
        self._snapshots = AdapterSnapshots(model) if rate is None else WeightSnapshots(model)
        on_gpu = model.device.type == "cuda"
        autocast = partial(torch.autocast, "cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext
        self._probe = PolicyProbe(PROBE_ROWS, int(rate is None), model, autocast)
        waits = WaitPolicy(check=lambda: None, say=print, stall_timeout_s=600.0)
        self._publisher = Publisher(self._announce, waits, lambda: "", self._errors)
        self._times: dict[str, float] = {}

    def _publish(self) -> None:
        self.publish_measured()

    def train(self) -> None:
        """Change every weight of the adapter, or all weights as AdamW's first step does."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if self._rate is not None:
                    parameter.add_(torch.randn_like(parameter).sign_(), alpha=self._rate)
                elif "lora_" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)

    def publish_measured(self, *, probes: bool = True) -> dict[str, float]:
        """When the main thread began, and what it and the publisher's thread took."""
        began = time.monotonic()
        measured = self._probe.measure(self._version) if probes else None
        probed = time.monotonic()
        snapshot = self._snapshots.take(measured)
        taken = time.monotonic()
        self._publisher.submit(self._version, self._version, snapshot)
        self._publisher.flush()
        self._version += 1
        return self._times | {"began": began, "probe_s": probed - began, "snapshot_s": taken - probed, "taken": taken}

    def _announce(self, step: int, policy: PublishedPolicy) -> bool:
        hashed = time.monotonic()
        self.intake.publish(policy)
        self._times = {"hashed": hashed, "announced": time.monotonic(), "bytes": float(len(policy.data))}
        return True


def serve(
    pipe: Connection,
    endpoints: tuple[str, str],
    model_folder: Path,
    folder: Path,
    moves: float,
    shares: bool,
    device: str,
) -> None:
    """Answers `publish` and `publish without probe` with its times, another command but `stop` with those of writing an adapter
    to that folder as PEFT does, or all weights. `moves` is the rank of the adapter, or a rate below 1, by which all weights
    move."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rate = moves if moves < 1 else None
    dtype = "float32" if rate is not None else DTYPES[device]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype)).to(device)
    if rate is None:
        lora = LoraConfig(r=int(moves), lora_alpha=moves, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    memory = shared_memory() if shares else contextlib.nullcontext(NO_MEMORY)
    with memory as shared:
        trainer = Trainer(ZmqServer(*endpoints, MAX_MESSAGE_BYTES), folder, model, shared, rate)
        with trainer:
            pipe.send("ready")
            while (command := pipe.recv()) != "stop":
                trainer.train()
                if command.startswith("publish"):
                    pipe.send(trainer.publish_measured(probes=command == "publish"))
                else:
                    began = time.monotonic()
                    if rate is None:
                        model.save_pretrained(command)
                    else:
                        save_weights(model, AutoTokenizer.from_pretrained(model_folder), command)
                    pipe.send({"began": began})
