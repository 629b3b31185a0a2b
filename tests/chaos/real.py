"""The demo under fire: real vLLM, real TRL, and SIGKILL for either daemon again and again until the run is done.

    python -m tests.chaos.real [--kills 10] [--seed 1] [--out runs/chaos/real.json]

Guarantee: it exits with 0 only if each daemon was killed at least `--kills` times, the run still took every step, no group
was trained twice, the held-out accuracy is the demo's, and the journal retrained offline gives the same adapter bit for
bit.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from examples.arithmetic.demo import BASE, CONFIG, build_base_model
from replay.journal.reader import JournalReader

START_S = 180.0
STEPS = 60
ACCURACY = 0.9


class Side:
    """One of the two daemons, started again whenever it was killed."""

    def __init__(self, module: str, log: Path, arguments: list[str]) -> None:
        self._command = [sys.executable, "-m", module, "--gpu", "cpu", *arguments]
        self._log = log
        self.kills = 0
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as stream:
            self.process = subprocess.Popen(self._command, stdout=stream, stderr=subprocess.STDOUT)
        self.started = time.monotonic()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.kills += 1
        self.start()

    def alive(self) -> bool:
        """Whether it runs; any end but a kill of ours is a failure, unless it is the end of the run."""
        code = self.process.poll()
        if code not in (None, 0):
            sys.exit(f"{self._log} ended with {code}:\n{self._log.read_text(errors='replace')[-3000:]}")
        return code is None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def accepted(journal: Path) -> int:
    """Groups in the journal: grows only while both daemons are at work."""
    if not journal.exists():
        return 0
    reader = JournalReader(journal)
    try:
        return reader.count()
    finally:
        reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each daemon")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos/real.json"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # so that the daemons end with this process
    rng = random.Random(arguments.seed)
    build_base_model()
    run_dir = arguments.out.parent / "real"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    common = ["--config", CONFIG, "--set", f"run_dir={run_dir}", "--set", f"seed={arguments.seed}"]
    common += ["--set", "replay.keep_all=true", "--set", "trainer.save_steps=4"]
    journal = run_dir / "journal.sqlite"
    started = time.monotonic()
    producer = Side("producer.cli", run_dir / "producer.log", common)
    trainer = Side("consumer.cli", run_dir / "trainer.log", [*common, "--resume"])
    try:
        endure(producer, trainer, journal, arguments.kills, rng)
        wall_s = time.monotonic() - started
        producer.process.wait(60)
    finally:
        producer.end()
        trainer.end()
    summary = verdict(run_dir, common, producer, trainer, journal) | {
        "wall_s": round(wall_s, 1),
        "seed": arguments.seed,
    }
    arguments.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    good = (
        min(producer.kills, trainer.kills) >= arguments.kills
        and summary["steps"] == STEPS
        and summary["trained_twice"] == 0
        and summary["eval_after"] >= ACCURACY
        and summary["replayed_bit_for_bit"]
    )
    sys.exit(0 if good else 1)


def endure(producer: Side, trainer: Side, journal: Path, kills: int, rng: random.Random) -> None:
    """Kills one of them, waits until both are at work again, a little longer, and so on; then lets them finish."""
    for victim in rng.sample([producer] * kills + [trainer] * kills, 2 * kills):
        before = accepted(journal)
        deadline = time.monotonic() + START_S
        while accepted(journal) <= before + 8:
            if not trainer.alive():
                return
            producer.alive()
            if time.monotonic() > deadline:
                sys.exit(f"no group was accepted within {START_S:.0f} s after a kill")
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 1.5))
        if not trainer.alive():
            return
        victim.kill()
        name = "rl-producer" if victim is producer else "rl-trainer"
        print(f"killed {name} ({producer.kills} + {trainer.kills}), {accepted(journal)} groups so far", flush=True)
    while trainer.alive():
        producer.alive()
        time.sleep(0.2)


def verdict(run_dir: Path, common: list[str], producer: Side, trainer: Side, journal: Path) -> dict[str, object]:
    from examples.arithmetic.evaluate import greedy_accuracy

    reader = JournalReader(journal)
    batches = list(reader.batches())
    num_groups = reader.count()
    reader.close()
    trained = [group_id for batch in batches for group_id in batch.group_ids[: batch.num_fresh]]
    again = run_dir.with_name("real-again")
    shutil.rmtree(again, ignore_errors=True)
    retrain = [sys.executable, "-m", "consumer.cli", "--gpu", "cpu", *common]
    subprocess.run([*retrain, "--set", f"run_dir={again}", "--from-journal", str(run_dir)], check=True)
    adapter = "adapter/adapter_model.safetensors"
    return {
        "kills_producer": producer.kills,
        "kills_trainer": trainer.kills,
        "steps": sum(batch.last_step - batch.step + 1 for batch in batches),
        "groups_journaled": num_groups,
        "groups_trained": len(trained),
        "trained_twice": len(trained) - len(set(trained)),
        "eval_before": greedy_accuracy(BASE, BASE / "eval.jsonl"),
        "eval_after": greedy_accuracy(BASE, BASE / "eval.jsonl", run_dir / "adapter"),
        "replayed_bit_for_bit": (again / adapter).read_bytes() == (run_dir / adapter).read_bytes(),
    }


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    main()
