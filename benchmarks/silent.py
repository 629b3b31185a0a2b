"""`make bench-silent`: an engine that serves something else than it says, what notices, and what training is worth then.

Guarantee: each run is the real pair of daemons on one of `benchmarks.tasks`, with one fault (`benchmarks.silent_producer`) from
a version on, or from the start. Arms: the product, which after a refusal goes on with a repaired producer (`--resume`); the
product without its proofs; TRL's AsyncGRPOTrainer with a vLLM server (`benchmarks.async_trl`). Accuracy is greedy, on held-out
prompts, by transformers and PEFT. Every finished run is a line of `--out`, and is not repeated.
"""

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.finished_runs import FinishedRuns
from benchmarks.silent_producer import VARIABLE, Fault
from benchmarks.silent_report import NO_PROOF, PROOF, TRL, draw, table
from benchmarks.tasks import TASKS
from campaigns.chaos.fleet import Daemon
from examples.arithmetic import build_model
from examples.arithmetic.demo import BASE
from examples.folders import build_once, fresh_folder
from producer.engine.configuration import ON_CPU
from protocol.runtime import json_lines
from replay.journal.reader import JournalReader
from tests.integration.vllm_server import wait_until_healthy
from tests.integration.warm import zygote
from tests.unit.protocol.channel_harness import reserve_port

FOLDER = Path("runs/bench/silent").absolute()
FIRST = {"sums": 6, "smollm2": 4}
"""The first version with a fault."""
STEPS = {"sums": 40, "smollm2": 16}
_OTHER_BASE = BASE.with_name("demo-base-other").absolute()
_END_S = 3600.0
_ROUNDING = "rounding loses the update"
_TASKS_OF_TRL = "32"  # at once, with which it was fastest here
_KL = "sampling/importance_sampling_ratio/kl"

FAULTS = {
    "none": Fault(),
    "the load does nothing": Fault("the base is served"),
    "alpha is halved": Fault("alpha is halved"),
    "no down_proj": Fault("down_proj is missing"),
    "an old adapter, new name": Fault("another adapter is held", other=str(FOLDER / "old"), keeps_old=True),
    "adapter of another run": Fault("another adapter is held", other=str(FOLDER / "another-run")),
    "one of two workers keeps an old one": Fault(
        "a worker takes another", other=str(FOLDER / "old"), keeps_old=True, workers=2
    ),
    "another base": Fault(base=str(_OTHER_BASE)),
    "another template": Fault(before_prompts="+"),
    "keys and values of other versions": Fault(stale_cache=True, settings=("engine.block_size=32",)),
    _ROUNDING: Fault(settings=("swap.mode=merged", "trainer.learning_rate=1.0e-5")),
}
_ONLY = {
    "keys and values of other versions": ("smollm2",),  # the demo's prompts fill no block
    "another base": ("sums",),
    "another template": ("sums",),
    _ROUNDING: ("sums",),
}
"""The tasks of a fault that not all can have."""
_NOT_TRL = ("one of two workers keeps an old one", "another template", _ROUNDING)
"""Faults that the arm of TRL cannot have: its server has one worker here, gets token ids, and merges nothing."""
_SERVER = """--host 127.0.0.1 --enforce-eager --max-model-len 128 --max-num-seqs 256 --enable-lora --max-loras 5
--max-lora-rank 16 --logprobs-mode processed_logprobs --block-size 32 --distributed-executor-backend"""


class Case(NamedTuple):
    """One run of the table."""

    task: str
    fault: str
    arm: str
    dtype: str
    steps: int

    @property
    def folder(self) -> Path:
        return FOLDER / re.sub(r"\W+", "-", "-".join(map(str, self)))

    @property
    def exists(self) -> bool:
        fits = self.task in _ONLY.get(self.fault, (self.task,)) and (
            self.fault != _ROUNDING or self.dtype == "bfloat16"
        )
        return fits and self.fault not in {NO_PROOF: ("none", _ROUNDING), TRL: _NOT_TRL}.get(self.arm, ())


def run(case: Case) -> dict[str, Any]:
    """Train with the fault, once more without it where it was refused, and return what came of it."""
    chosen, folder = FAULTS[case.fault], case.folder
    if case.fault == "adapter of another run":
        chosen = replace(chosen, other=str(another_run(case)))
    fault = replace(chosen, first=FIRST[case.task], proved=case.arm == PROOF)
    fresh_folder(folder)
    began = time.monotonic()
    code = run_trl(case, fault) if case.arm == TRL else run_pair(case, folder, 1, fault)
    refused = re.search(r"v(\d+) is refused, [^:]*: (.*)", (folder / "producer.log").read_text(errors="replace"))
    found = case._asdict() | {
        "code": code,
        "refused": refused and int(refused[1]),
        "why": refused and refused[2].replace(f"{FOLDER}/", ""),
        "stopped_after": len(steps_of(folder)),
        "warnings": warnings(folder),
        "wrong_tokens": None if case.arm == TRL else tokens_since(folder, fault),
        "seconds": round(time.monotonic() - began),
    }
    if code and (case.arm == TRL or run_pair(case, folder, 1, Fault(), "--resume")):
        sys.exit(f"{folder}: the run failed, or the repaired one: see its logs")
    columns = {"rewards": "reward", "kl": "kl" if case.arm == TRL else _KL}
    found |= {name: [round(line[key], 4) for line in steps_of(folder)] for name, key in columns.items()}
    return found | {"accuracy": TASKS[case.task].accuracy(folder / "adapter")}


def run_pair(case: Case, folder: Path, seed: int, fault: Fault, *arguments: str) -> int:
    """Train to the end, and return the trainer's exit code. Logs of a repaired pair have names of their own."""
    with tempfile.TemporaryDirectory(prefix="silent-") as sockets:  # paths of sockets must be short
        changes = [
            *(f"run_dir={folder}", f"seed={seed}", f"transport.endpoint=ipc://{sockets}/control.ipc"),
            *(f"model.dtype={case.dtype}", f"trainer.max_steps={case.steps}", "evaluation=null"),
            *("swap.mode=adapter", "observability.progress=false", *fault.settings),
        ]
        config = TASKS[case.task].config
        words = ["--gpu", "cpu", "--config", config, *(word for change in changes for word in ("--set", change))]
        kind = "-repaired" if arguments else ""
        producer = start("producer", "benchmarks.silent_producer", words, folder / f"producer{kind}.log", fault)
        trainer = start("trainer", "consumer.app.cli", [*words, *arguments], folder / f"trainer{kind}.log", fault)
        try:
            deadline = time.monotonic() + _END_S
            while trainer.poll() is None and producer.poll() in (None, 0) and time.monotonic() < deadline:
                time.sleep(0.1)
            if trainer.poll() == 0:
                producer.wait(60)
        finally:
            for daemon in (trainer, producer):
                end(daemon)
    code = trainer.wait(1)
    if not code and len(steps_of(folder)) < case.steps:
        sys.exit(f"{folder}: the producer failed: see its log")
    return code


def run_trl(case: Case, fault: Fault) -> int:
    """Train with TRL and a vLLM server, and return the trainer's exit code."""
    with ExitStack() as stack:
        url = f"http://127.0.0.1:{(port := reserve_port(stack))}"
        words = [*_SERVER.split(), ON_CPU["distributed_executor_backend"], "--dtype", case.dtype]
        words += ["--model", fault.base or str(TASKS[case.task].base), "--port", str(port)]
        server = start("producer", "benchmarks.silent_server", words, case.folder / "producer.log", fault)
        stack.callback(end, server)
        wait_until_healthy(url, server, server.log)
        words = [case.task, str(case.folder), url, _TASKS_OF_TRL, str(case.steps)]
        words += [f"model.dtype={case.dtype}", f"trainer.max_steps={case.steps}"]
        trainer = start("trainer", "benchmarks.async_trl", words, case.folder / "trainer.log", fault)
        stack.callback(end, trainer)
        return trainer.wait(_END_S)


def start(role: Any, module: str, words: list[str], log: Path, fault: Fault) -> Daemon:
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if fault.workers > 1 else {}  # no NUMA node for each here
    environment = {
        VARIABLE: json.dumps(asdict(fault)), "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
    } | bound  # fmt: skip
    return zygote(role).start(
        [module, *words], log=log, module=module, environment=environment, cwd=os.getcwd(), spawns=False, network=None
    )


def end(daemon: Daemon) -> None:
    daemon.send(signal.SIGTERM)
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait(10)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return json_lines.read(folder / "steps.jsonl")


def warnings(folder: Path) -> list[str]:
    """Return the first warnings of either daemon, without what a refusal says."""
    logs = ((folder / f"{name}.log").read_text(errors="replace") for name in ("producer", "trainer"))
    return [line for log in logs for line in log.splitlines() if "WARNING" in line and " refuse" not in line][:5]


def tokens_since(folder: Path, fault: Fault) -> int:
    """Return the number of journaled tokens that the engine sampled with the fault."""
    if not (fault.of_workers or fault.base or fault.before_prompts or fault.stale_cache):
        return 0
    first = fault.first if fault.of_workers else 0
    with closing(JournalReader(folder / "journal.sqlite")) as reader:
        return sum(row.num_tokens for row in list(reader.rows()) if row.policy_version >= first)


def build_other_base() -> None:
    """Build the demo's base once more, trained a little less long."""
    recipe = Path(build_model.__file__).read_bytes()
    command = [sys.executable, "-m", "examples.arithmetic.build_model", "--steps", "850"]
    build_once(_OTHER_BASE, recipe, lambda folder: subprocess.run([*command, str(folder)], check=True))


def another_run(case: Case) -> Path:
    """Return the adapter of a healthy run of another seed, which is made once."""
    folder = FOLDER / f"another-run-{case.task}"
    if not (folder / "adapter").exists():
        fresh_folder(folder)
        if code := run_pair(case._replace(fault="none", arm=PROOF, dtype="float32"), folder, 2, Fault()):
            sys.exit(f"{folder}: exit code {code}: see its logs")
    return folder / "adapter"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=FIRST, default="sums")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--arms", nargs="+", choices=(PROOF, NO_PROOF, TRL), default=(PROOF, NO_PROOF, TRL))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, help=f"(default: {STEPS})")
    parser.add_argument("--out", type=Path, default=FOLDER.with_suffix(".jsonl"), help="file to append to")
    parser.add_argument("--plot", type=Path, help="picture to write, of all runs in --out")
    options = parser.parse_args(argv)
    TASKS[options.task].build()
    build_other_base()
    runs, steps = FinishedRuns(options.out), options.steps or STEPS[options.task]
    for fault, arm in itertools.product(options.faults, options.arms):
        case = Case(options.task, fault, arm, options.dtype, steps)
        if case.exists and (found := runs.make(case, run)) is not None:
            print({key: found[key] for key in ("fault", "arm", "code", "refused", "accuracy", "seconds")}, flush=True)
    print(table(runs.lines))
    if options.plot is not None:
        draw(runs.lines, options.plot)


if __name__ == "__main__":
    main()
