"""Trace the four walks through the house and count the files on each: `python -m docs.walks [--list]`.

Both daemons run as their commands do, on a tiny model. This process plays the other side over the real sockets, and
`tests.scripted_engine` plays vLLM unless `--vllm` is given. A function is on a walk if it runs between its two ends, in any
thread or child of the daemon, and does not run while the daemon is idle. A function that also runs then is on the walk if it
calls one that does not.
"""

import argparse
import itertools
import json
import mmap
import os
import pkgutil
import queue
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
WALKS = {
    "lease": "a lease: producer, socket to acknowledged group",
    "batch": "a group and its batch: trainer, socket to optimizer step",
    "out": "a policy: trainer, optimizer step to bytes on the wire",
    "in": "a policy: producer, bytes to the first token sampled with it",
}
_OFF, _IDLE, _LEASE, _BATCH, _OUT, _IN = range(6)
_NAMES = {_LEASE: "lease", _BATCH: "batch", _OUT: "out", _IN: "in"}
_PACKAGES = ("protocol", "replay", "producer", "consumer", "slipstream_extras")
_IDLE_S = 3.0
NUM_COMPLETIONS = 4
_HAND_OVERS = (threading.__file__, queue.__file__)
_FOLDER = "SLIPSTREAM_WALKS"  # an environment variable, for the daemons and their children


class Call(NamedTuple):
    """The first call of a function on a walk."""

    walk: str
    time: int
    thread: str
    file: str
    function: str


class Phase:
    """The phase of the trace, one byte in a file that all processes map."""

    def __init__(self, folder: Path) -> None:
        file = folder / "phase"
        if not file.exists():
            file.write_bytes(bytes(1))
        with file.open("r+b") as opened:
            self.byte = mmap.mmap(opened.fileno(), 1)

    def set(self, phase: int) -> None:
        self.byte[0] = phase


class Tracer:
    """Note, in this process and all of its threads, each function's first call in each phase."""

    def __init__(self, folder: Path) -> None:
        self.phase = Phase(folder)
        self._byte = self.phase.byte
        self._folder = folder
        self._prefixes = tuple(f"{REPOSITORY / package}{os.sep}" for package in _PACKAGES)
        self._is_ours: dict[Any, bool] = {}
        self._idle: set[Any] = set()
        self._noted: set[tuple[int, Any]] = set()
        self._has_handed_over = False

    def start(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        phase = self._byte[0]
        if not phase or event != "call":
            if phase == _OUT and event == "c_call" and isinstance(getattr(called, "__self__", None), queue.SimpleQueue):
                self._note_hand_over(frame)
            return
        code = frame.f_code
        if self._ours(code):
            if phase == _IDLE:
                self._idle.add(code)
            elif code not in self._idle and (phase, code) not in self._noted:
                self._note(phase, frame)
        elif phase == _BATCH and code.co_name == "step" and "/torch/optim/" in code.co_filename:
            self.phase.set(_OUT)
        elif (
            phase == _OUT and code.co_filename in _HAND_OVERS and code.co_name in ("notify", "notify_all", "set", "put")
        ):
            self._note_hand_over(frame.f_back)
        elif phase == _IN and code.co_name == "process_outputs" and "/vllm/" in code.co_filename:
            is_proof = len(frame.f_locals["engine_core_outputs"]) < NUM_COMPLETIONS
            self.phase.set(_IN if is_proof else _OFF)

    def _note_hand_over(self, frame: FrameType | None) -> None:
        """What the main thread does after it gave the policy to another thread is not on the policy's walk."""
        if frame is not None and threading.current_thread() is threading.main_thread() and self._ours(frame.f_code):
            self._has_handed_over = True

    def _ours(self, code: Any) -> bool:
        known = self._is_ours.get(code)
        if known is None:
            inner = code.co_name.startswith("<") and code.co_name != "<lambda>"
            known = self._is_ours[code] = code.co_filename.startswith(self._prefixes) and not inner
        return known

    def _note(self, phase: int, frame: FrameType) -> None:
        """Write down the function and those below it on the stack, but for what the main thread runs from its start on."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and phase == _OUT and self._has_handed_over:
            return
        stack = [frame.f_code]
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            if self._ours(frame.f_code) and (not is_main or frame.f_code in self._idle):
                stack.append(frame.f_code)
        with (self._folder / f"{os.getpid()}.calls").open("a") as file:
            for code in reversed(stack):
                if (phase, code) not in self._noted:
                    self._noted.add((phase, code))
                    path = str(Path(code.co_filename).relative_to(REPOSITORY))
                    thread = f"{os.getpid()} {threading.current_thread().name}"
                    file.write(json.dumps([_NAMES[phase], time.time_ns(), thread, path, code.co_qualname]) + "\n")


def run_traced(command: str, engine: str) -> None:
    """Become a daemon that is traced, with its children: the command of this name, with the arguments of this process."""
    folder = Path(os.environ[_FOLDER])
    hook = folder / "site"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(
        f"import os, pathlib, docs.walks\ndocs.walks.Tracer(pathlib.Path(os.environ['{_FOLDER}'])).start()\n"
    )
    os.environ["PYTHONPATH"] = f"{hook}:{REPOSITORY}"
    Tracer(folder).start()
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    main = pkgutil.resolve_name(scripts[command])
    if engine == "scripted":
        from tests import scripted_engine

        phase = Phase(folder)
        scripted_engine.install(
            scripted_engine.Pace(share_slow=0.0), 0, lambda _: phase.set(_OFF) if phase.byte[0] == _IN else None
        )
    main()


@contextmanager
def daemon(folder: Path, command: str, engine: str = "scripted") -> "Iterator[subprocess.Popen[bytes]]":
    """The command as a process of `docs.traced_daemon`."""
    variables = {_FOLDER: str(folder), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    arguments = [command, engine, "--config", str(folder / "run.yaml"), "--gpu", "cpu"]
    with (folder / f"{command}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "docs.traced_daemon", *arguments],
            env=os.environ | variables | {"HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    except BaseException:
        print((folder / f"{command}.log").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def configuration(folder: Path) -> Any:
    """A run on a tiny model of random weights, whose steps take one group each."""
    import yaml

    from protocol.config.loader import load_config
    from tests.integration.models import build_model

    model = build_model("qwen2", folder / "model", num_layers=1)
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": 2 * i}) + "\n" for i in range(40))
    )
    (folder / "rewards.py").write_text(
        "def reward(completions, **_):\n    return [float(i % 2) for i, _ in enumerate(completions)]\n"
    )
    sections = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "dataset": {"path": str(folder / "train.jsonl")},
        "rewards": {"functions": [{"function": f"{folder}/rewards.py:reward"}], "num_workers": 1},
        "sampling": {"num_generations": NUM_COMPLETIONS, "max_completion_length": 6},
        "pipeline": {"groups_per_step": 1, "max_staleness": 8},
        "transport": {"heartbeat_interval_s": 250.0, "heartbeat_timeout_s": 600.0},
        "lora": {"r": 4, "lora_alpha": 8},
        "engine": {"max_model_len": 64, "max_num_seqs": 8, "enforce_eager": True},
        "trainer": {"max_steps": 20, "learning_rate": 1e-3, "gradient_checkpointing": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return load_config(str(folder / "run.yaml"))


def until(
    condition: Callable[[], Any], what: str, process: "subprocess.Popen[bytes]", timeout_s: float = 240.0
) -> None:
    """Wait for it; fail when the process ends or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {timeout_s:g} s, or the daemon has ended")
        time.sleep(0.01)


class Peer:
    """A producer of scripted answers that sends only what it is asked to."""

    def __init__(self, config: Any) -> None:
        from protocol.channel.client import ZmqClient

        self.channel = ZmqClient("walk", config.control_endpoint, config.blob_endpoint, 2**26)
        self.received: list[Any] = []

    def wait_for(
        self, kind: type, count: int, process: "subprocess.Popen[bytes]", fits: Callable[[Any], bool] = lambda _: True
    ) -> list[Any]:
        def has_come() -> bool:
            self.received += self.channel.poll(0.02)
            return len(self.all(kind, fits)) >= count

        until(has_come, f"{count} x {kind.__name__}", process)
        return self.all(kind, fits)

    def all(self, kind: type, fits: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind) and fits(message)]


def walk_trainer(folder: Path, config: Any, phase: Phase) -> list[tuple[Any, Any, bytes]]:
    """Trace the walks of a batch and of a policy that leaves; return policies with their offers and bytes."""
    from protocol.wire import messages
    from protocol.wire.model_folder import base_model_digest, tokenizer_digest
    from tests.scripted import facts, made_up_group

    model = Path(config.model.path)
    digests = {"base_model_digest": base_model_digest(model), "tokenizer_digest": tokenizer_digest(model)}
    policies = []
    with daemon(folder, "rl-trainer") as process:
        until(Path(config.control_endpoint.removeprefix("ipc://")).exists, "socket of the trainer", process)
        peer = Peer(config)
        while not peer.channel.send(messages.Hello("walk", facts(**digests), 4)):
            time.sleep(0.1)  # until it is connected
        leases = peer.wait_for(messages.Lease, 4, process)
        held = [lease.lease_id for lease in leases]
        peer.channel.send(messages.Heartbeat(0, 0, held, 0, 0.0))  # no room for leases: they would mix with the walks
        [welcome] = peer.wait_for(messages.Welcome, 1, process)

        def step(lease: Any, version: int, policy: Any) -> Any:
            if policy is None:
                peer.channel.send(made_up_group(lease, version))
                [news] = peer.wait_for(messages.Policy, 1, process, lambda it: it.policy.version == version + 1)[:1]
                policy = news.policy
            offers, chunks = len(peer.all(messages.PolicyOffer)), len(peer.all(messages.BlobChunk))
            peer.channel.send(messages.PolicyRequest(policy.digest))
            offer = peer.wait_for(messages.PolicyOffer, offers + 1, process)[-1]
            peer.channel.send(messages.BlobRequest(policy.digest, 0, policy.num_bytes))
            chunk = peer.wait_for(messages.BlobChunk, chunks + 1, process)[-1]
            policies.append((policy, offer, chunk.data))

        step(None, 0, welcome.policy)
        step(leases[0], 0, None)
        step(leases[1], 1, None)
        phase.set(_IDLE)
        time.sleep(_IDLE_S)
        phase.set(_BATCH)  # the daemon itself goes on to the next walk at its optimizer's step
        step(leases[2], 2, None)
        phase.set(_OFF)
        peer.channel.send(messages.Bye("stopping"))
        peer.channel.close()
    return policies


def walk_producer(folder: Path, config: Any, phase: Phase, policies: list[Any], engine: str) -> None:
    """Trace the walks of a lease and of a policy that arrives."""
    from protocol.channel.server import ZmqServer
    from protocol.wire import messages
    from tests.scripted_trainer import ScriptedTrainer, lease

    for endpoint in (config.control_endpoint, config.blob_endpoint):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
    trainer = ScriptedTrainer(
        ZmqServer(config.control_endpoint, config.blob_endpoint, 2**26), policies[0][0], heartbeat_s=250.0
    )
    for policy, offer, data in policies:
        trainer.blobs[policy.digest] = data
        if engine == "vllm":  # a scripted one has nothing to prove
            trainer.offers[policy.digest] = offer
    trainer.start()
    with daemon(folder, "rl-producer", engine) as process:
        until(lambda: trainer.all(messages.Hello), "hello of the producer", process)

        def answer(number: int, floor: int) -> None:
            trainer.send(lease(number, policy_floor=floor))
            until(
                lambda: sum(type(it).__name__.endswith("Group") for it in list(trainer.received)) == number,
                "group",
                process,
            )

        answer(1, 0)
        trainer.publish(policies[1][0], policies[1][2])
        answer(2, 1)
        phase.set(_IDLE)
        time.sleep(_IDLE_S)
        phase.set(_LEASE)
        answer(3, 1)
        time.sleep(1.0)  # for the acknowledgement
        phase.set(_IDLE)
        time.sleep(0.5)
        phase.set(_IN)
        trainer.publish(policies[2][0], policies[2][2])
        answer(4, 2)
        phase.set(_OFF)
        trainer.send(messages.Bye("finished"))
        time.sleep(0.3)
    trainer.stop()
    trainer.channel.close()


def trace(engine: str = "scripted") -> dict[str, list[Call]]:
    """The calls of each walk, thread by thread in the order in which they came to it."""
    with tempfile.TemporaryDirectory(prefix="walks-") as name:
        folder = Path(name)
        config, phase = configuration(folder), Phase(folder)
        walk_producer(folder, config, phase, walk_trainer(folder, config, phase), engine)
        lines = [line for file in folder.glob("*.calls") for line in file.read_text().splitlines()]
    calls = sorted((Call(*json.loads(line)) for line in lines), key=lambda call: call.time)
    walks = {}
    for walk in WALKS:
        own = [call for call in calls if call.walk == walk]
        threads = list(dict.fromkeys(call.thread for call in own))
        walks[walk] = sorted(own, key=lambda call: threads.index(call.thread))
    return walks


def files_of(calls: list[Call]) -> dict[str, list[Call]]:
    """Its files in their order, each with its calls."""
    files: dict[str, list[Call]] = {}
    for call in calls:
        files.setdefault(call.file, []).append(call)
    return files


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m docs.walks", description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--list", action="store_true", help="print the files of each walk in order, with their functions"
    )
    arguments.add_argument(
        "--vllm", action="store_true", help="trace vLLM's side of the engine too; takes a minute longer"
    )
    chosen = arguments.parse_args()
    print(f"{'walk':62} files functions changes threads")
    for walk, calls in trace("vllm" if chosen.vllm else "scripted").items():
        files = files_of(calls)
        changes = sum(before.file != after.file for before, after in itertools.pairwise(calls))
        functions, threads = len({(call.file, call.function) for call in calls}), len({call.thread for call in calls})
        print(f"{WALKS[walk]:62} {len(files):5} {functions:9} {changes:7} {threads:7}")
        if chosen.list:
            for file, own in files.items():
                print(f"    {file}: {', '.join(dict.fromkeys(call.function for call in own))}")


if __name__ == "__main__":
    main()
