"""`python -m campaigns.cluster.moving`: the demo under Ray, and the demo moved from place to place while it learns.

Guarantee: it exits with 0 only if both runs end at their last step, the second one after a pair of processes, Ray, SLURM and a
pair again, one after the other in the same folder with the same YAML; if each step was taken once; if `slipstream journal verify`
finds nothing; and if both answer as many held-out prompts as the demo does. Everything is real, vLLM too; Ray's three
nodes, each of SLURM's two and the pairs are on this machine.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml

from campaigns.cluster.machine import REPOSITORY, cluster_run, eventually, newest_step
from examples.arithmetic import demo
from protocol.runtime import json_lines as rotated_lines
from slipstream.cli import run as slipstream
from tests.integration.slurm import Slurm, edited_scripts, free_ports

_MOVES_AT = (15, 30, 45)
_ACCURACY = 0.97  # which the demo reaches with every seed that was tried
_STAGE_S = 1200.0
_CONFIG = ("--config", "run.yaml")
_SIZE = ("--gpus", "0", "--ranks", "2")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.cluster.moving", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", choices=("stay", "move"), help="one of the two runs")
    parser.add_argument("--out", type=Path, help="write the summary to this file")
    chosen = parser.parse_args()
    os.chdir(REPOSITORY)
    demo.build_base_model()
    folder = Path(tempfile.mkdtemp(prefix="slipstream-moving-"))
    runs: dict[str, Callable[[Path], dict[str, float]]] = {"stay": _stay, "move": _move}
    found = {}
    for name, run in runs.items():
        if chosen.only in (None, name):
            found[name] = _judged(_prepare(folder / name), run)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    summary = {"ok": all(run["ok"] for run in found.values()), **found}
    text = json.dumps(summary, indent=1)
    print(text)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(text + "\n")
    if not summary["ok"]:
        print(f"The runs are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _prepare(folder: Path) -> Path:
    """A folder with the demo's YAML, as its user would have it there."""
    folder.mkdir()
    shutil.copy(REPOSITORY / "examples/arithmetic/rewards.py", folder)
    values = yaml.safe_load((REPOSITORY / demo.CONFIG).read_text())
    base = REPOSITORY / demo.BASE
    values |= {"run_dir": "run", "model": values["model"] | {"path": str(base)}}
    values["dataset"]["path"] = str(base / "train.jsonl")
    values["rewards"]["functions"] = [{"function": "rewards.py:exact_match"}]
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder


def _judged(folder: Path, run: Callable[[Path], dict[str, float]]) -> dict[str, Any]:
    from examples.arithmetic.evaluate import greedy_accuracy

    stages = run(folder)
    steps = [line["step"] for line in rotated_lines.read(folder / "run/steps.jsonl")]
    accuracy = greedy_accuracy(demo.BASE, demo.BASE / "eval.jsonl", folder / "run/adapter")
    verified = slipstream(["journal", "--run", str(folder / "run"), "verify"])
    each_once = steps == list(range(1, _last_step(folder) + 1))
    return {
        "ok": each_once and verified == 0 and accuracy >= _ACCURACY,
        "accuracy": accuracy,
        "each_step_once": each_once,
        "rl_journal_verify": verified,
        "wall_s": {name: round(seconds) for name, seconds in stages.items()},
    }


def _stay(folder: Path) -> dict[str, float]:
    began = time.monotonic()
    with cluster_run(folder, 3, 3, scripted=False) as run:
        run.command("up", *_CONFIG, *_SIZE, "--producers", "3", code=0, timeout_s=_STAGE_S)
    return {"Ray": time.monotonic() - began}


def _move(folder: Path) -> dict[str, float]:
    stages = {}
    places: list[tuple[str, Callable[[Path, int], None]]] = [
        ("pair", _pair), ("Ray", _ray), ("SLURM", _slurm), ("pair again", _pair)
    ]  # fmt: skip
    for (name, place), step in zip(places, (*_MOVES_AT, _last_step(folder)), strict=True):
        began = time.monotonic()
        place(folder, step)
        stages[name] = time.monotonic() - began
        print(f"{name}: at step {newest_step(folder / 'run')} after {stages[name]:.0f} s", file=sys.stderr, flush=True)
    return stages


def _pair(folder: Path, until: int) -> None:
    resume = ["--resume"] if (folder / "run").exists() else []
    with _daemon(folder, "producer.app.cli") as producer, _daemon(folder, "consumer.app.cli", *resume) as trainer:
        eventually(lambda: newest_step(folder / "run") >= until or trainer.poll() is not None, _STAGE_S)
        if until == _last_step(folder):  # the producer ends with the trainer
            assert (trainer.wait(60), producer.wait(60)) == (0, 0)


def _ray(folder: Path, until: int) -> None:
    with cluster_run(folder, 3, 3, scripted=False) as run:
        run.command("up", *_CONFIG, *_SIZE, "--producers", "2", "--detach")
        eventually(lambda: newest_step(folder / "run") >= until, _STAGE_S)
        assert "trainer: ended with 0" in run.command("down", *_CONFIG)


def _slurm(folder: Path, until: int) -> None:
    own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with closing(Slurm()) as slurm:

        def ask(*command: str) -> str:
            done = subprocess.run(
                command, cwd=folder, env=slurm.environment | own, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        endpoint = f"tcp://127.0.0.1:{free_ports(3)[0]}"
        edited_scripts(folder, Path(sys.executable).parent, endpoint, REPOSITORY / demo.BASE)
        job = folder / "trainer.sbatch"
        own_values = f'--set "transport.endpoint={endpoint}" --set transport.keys=keys --ranks 2'
        job.write_text(job.read_text().replace("--resume)", f"--resume {own_values})"))
        trainer, producers = re.findall(r": job (\d+)", ask("./submit.sh", "2"))
        eventually(lambda: newest_step(folder / "run") >= until, _STAGE_S)
        for job in (trainer, producers):
            ask("scancel", job)
        eventually(lambda: not slurm.ask("squeue", "--noheader").strip(), 120)


@contextmanager
def _daemon(folder: Path, module: str, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Told to stop at the end, unless it has ended."""
    command = [sys.executable, "-m", module, "--gpu", "cpu", *_CONFIG, *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    with (folder / f"{module}.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, module


def _last_step(folder: Path) -> int:
    return int(yaml.safe_load((folder / "run.yaml").read_text())["trainer"]["max_steps"])


if __name__ == "__main__":
    sys.exit(main())
