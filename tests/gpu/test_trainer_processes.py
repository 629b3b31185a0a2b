"""Commands as processes with `--gpu 0`, on the stand-in GPU."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ExitCode
from tests.gpu.conftest import Model
from tests.gpu.daemons import Command
from tests.gpu.stand_in import building
from tests.integration.pair import Daemon
from tests.integration.runs import Run
from tests.tools import require

pytestmark = [pytest.mark.integration, pytest.mark.timeout(290)]

_END_S = 240.0


class Machine:
    """A folder of a run, and what runs on its GPU."""

    def __init__(self, folder: Path, socket_folder: Path, model: Path, stack: ExitStack) -> None:
        self._folder, self._sockets, self._model, self._stack = folder, socket_folder, model, stack
        self._machine = os.urandom(4).hex()

    def run(self, **sections: Any) -> Run:
        sections["transport"] = {"endpoint": f"ipc://{self._sockets}/control.ipc"}
        sections["trainer"] = {"max_steps": 3} | sections.get("trainer", {})
        return Run(self._folder, self._model, self._stack, **sections)

    def start(self, module: str, *arguments: str, gpu_bytes: int | None = None) -> Command:
        log = self._folder / f"{module}.log"
        command = Command(module, arguments, log, gpu_bytes=gpu_bytes, machine=self._machine)
        self._stack.callback(command.close)
        return command

    def trainer(self, run: Run, *arguments: str, **options: Any) -> Command:
        return self.start("consumer.app.cli", "--gpu", "0", "--config", str(run.config_file), *arguments, **options)


@pytest.fixture
def machine(tmp_path: Path, short_dir: Path, model: Model) -> Iterator[Machine]:
    require(building.COMPILER, "g++")
    with ExitStack() as stack:
        yield Machine(tmp_path, short_dir, model("qwen2"), stack)


def test_a_trainer_alone_on_its_gpu_beside_vllm(machine: Machine, tmp_path: Path) -> None:
    reward = "def reward(completions, **_):\n    return [float(len(text) % 3) for text in completions]\n"
    (tmp_path / "rewards.py").write_text(reward)
    run = machine.run(
        rewards={"functions": [{"function": f"{tmp_path}/rewards.py:reward"}], "num_workers": 1},
        engine={"max_model_len": 64, "max_num_seqs": 16, "enforce_eager": True},
    )
    trainer = machine.trainer(run)
    producer = Daemon("producer.app.cli", tmp_path / "producer.log", "--config", str(run.config_file))
    run.stack.callback(producer.close)
    assert trainer.end(_END_S) == 0, trainer.output[-3000:] + producer.output[-3000:]
    assert producer.end(60) == 0, producer.last_words
    assert run.column("step") == [1, 2, 3]
    assert (Path(run.config.run_dir) / "adapter" / "adapter_model.safetensors").exists()
    assert "refus" not in producer.output, "what the GPU computes is what the engine computes"


def test_a_trainer_that_shares_its_gpu_has_its_share(machine: Machine) -> None:
    run = machine.run(pipeline={"gpu": "shared"})
    trainer = machine.trainer(run, "--set", "model.dtype=bfloat16")
    run.producer(changes={"dtype": "bfloat16"})
    assert trainer.end(_END_S) == 0, trainer.output[-3000:]
    assert run.column("step") == [1, 2, 3]


@pytest.mark.parametrize("weights", [{}, {"lora": None, "model": {"dtype": "bfloat16"}}], ids=["adapter", "full"])
def test_a_trainer_and_producers_take_turns_on_the_gpu(
    weights: dict[str, Any], machine: Machine, tmp_path: Path
) -> None:
    reward = "def reward(completions, **_):\n    return [float(len(text)) for text in completions]\n"
    (tmp_path / "rewards.py").write_text(reward)
    run = machine.run(
        **weights,
        pipeline={"gpu": "turns", "gpu_handover_s": 60, "max_staleness": 1},
        rewards={"functions": [{"function": f"{tmp_path}/rewards.py:reward"}], "num_workers": 1},
    )
    trainer = machine.trainer(run)
    producer = machine.start("tests.integration.turns_producer", "--gpu", "0", "--config", str(run.config_file))
    assert trainer.end(_END_S) == 0, trainer.output[-3000:] + producer.output[-3000:]
    assert producer.end(60) == 0, producer.output[-3000:]
    assert run.column("step") == [1, 2, 3]


def test_a_trainer_whose_base_does_not_fit_names_the_key(machine: Machine) -> None:
    trainer = machine.trainer(machine.run(), gpu_bytes=100_000)
    assert trainer.end(_END_S) == ExitCode.DEVICE, trainer.output[-3000:]
    assert "model.path" in trainer.output


def test_a_gpu_that_is_not_there_is_refused(machine: Machine) -> None:
    run = machine.run()
    trainer = machine.start("consumer.app.cli", "--gpu", "1", "--config", str(run.config_file))
    assert trainer.end(_END_S) == ExitCode.DEVICE, trainer.output[-3000:]
    assert "--gpu 1" in trainer.output


def test_a_warm_start_and_an_export(machine: Machine, tmp_path: Path) -> None:
    run = machine.run(
        sft={"completion_column": "answer", "max_steps": 2},
    )
    rows = [{"prompt": f"{i}+{i}=", "answer": "seven"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    on_gpu = ["--gpu", "0", "--config", str(run.config_file)]
    sft = machine.start("slipstream", "sft", *on_gpu)
    assert sft.end(_END_S) == 0, sft.output[-3000:]
    adapter, merged = Path(run.config.run_dir) / "sft", tmp_path / "merged"
    assert (adapter / "adapter_model.safetensors").exists()
    export = machine.start("slipstream", "export", *on_gpu, "--checkpoint", str(adapter), "--to", str(merged))
    assert export.end(_END_S) == 0, export.output[-3000:]
    assert list(merged.glob("*.safetensors"))


def test_the_gpu_check_describes_the_machine(machine: Machine, tmp_path: Path) -> None:
    findings = tmp_path / "findings"
    part = machine.start("benchmarks.gpu_check.part", "machine", "0", str(tmp_path), str(tmp_path), str(findings))
    assert part.end(_END_S) == 0, part.output[-3000:]
    found = {line["what"]: line for line in map(json.loads, findings.read_text().splitlines())}
    assert found["GPU 0"]["capability"] == "9.0"
