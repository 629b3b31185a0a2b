"""Runs of the real trainer against scripted producers, for tests: a folder, its configuration, and what works on it."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from protocol.channel.client import ZmqClient
from protocol.config.loader import load_config
from protocol.runtime import json_lines as rotated_lines
from protocol.wire.model_folder import base_model_digest, tokenizer_digest
from tests.scripted import ScriptedProducer, facts

from .pair import Daemon


class Run:
    """One run directory, and the processes and producers that work on it."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack, /, **sections: Any) -> None:
        self.folder = folder
        self.model = model
        self.stack = stack
        self.config_file = folder / "run.yaml"
        rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(40)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values: dict[str, Any] = {
            "run_dir": str(folder / "run"),
            "model": {"path": str(model), "dtype": "float32"},
            "dataset": {"path": str(folder / "train.jsonl")},
            "rewards": {"functions": [{"function": "rewards:reward"}]},
            "sampling": {"num_generations": 4, "max_completion_length": 6},
            "pipeline": {"groups_per_step": 2, "fill": "full"},
            "transport": {"heartbeat_interval_s": 0.3, "heartbeat_timeout_s": 1.5},
            "lora": {"r": 4, "lora_alpha": 8},
            "trainer": {"max_steps": 6, "learning_rate": 1e-3, "gradient_checkpointing": False},
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
        self.config_file.write_text(yaml.safe_dump(values))
        self.config = load_config(str(self.config_file))

    def trainer(self, *arguments: str, module: str = "consumer.app.cli", spawns: bool = False) -> Daemon:
        log = self.folder / "trainer.log"
        process = Daemon(module, log, "--config", str(self.config_file), *arguments, spawns=spawns)
        self.stack.callback(process.kill)
        return process

    def producer(self, name: str = "scripted", changes: Any = (), **options: Any) -> ScriptedProducer:
        """One whose facts fit, but for the changes."""
        channel = ZmqClient(name, self.config.control_endpoint, self.config.blob_endpoint, 2**26)
        digests = {"base_model_digest": base_model_digest(self.model), "tokenizer_digest": tokenizer_digest(self.model)}
        options = {"swap_mode": self.config.weights} | options
        producer = ScriptedProducer(channel, facts(**digests | dict(changes)), name=name, **options).start()
        self.stack.callback(producer.stop)
        return producer

    @property
    def steps(self) -> list[dict[str, Any]]:
        return rotated_lines.read(Path(self.config.run_dir) / "steps.jsonl")

    def column(self, name: str) -> list[Any]:
        return [step[name] for step in self.steps]

    def wait_for_step(self, number: int) -> None:
        eventually(lambda: any(step >= number for step in self.column("step")[-1:]))

    def checkpoint(self, step: int) -> Path:
        return self.config.checkpoints_dir / f"checkpoint-{step}"


def eventually(condition: Callable[[], Any], timeout_s: float = 90.0, pause_s: float = 0.02) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause_s)
