"""`slipstream run`, with the real daemons, from a folder that is not the run's: a kill, the logs and the exit code."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from protocol.runtime import json_lines as rotated_lines
from tests.integration.test_pair import REWARD, write_run
from tests.integration.warm_commands import WarmCommands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STEPS = 24  # so many that the producer dies in the middle
COMMAND = ["-m", "slipstream", "run", "--producer-gpus", "cpu", "--trainer-gpus", "cpu"]


def producer_of(pid: int) -> psutil.Process | None:
    """The process of rl-producer below this one."""
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            if "producer.app.cli" in command and not any("keeper" in word for word in command):
                return child
    return None


def test_one_command_from_another_folder_outlives_its_producer(short_dir: Path, warm: WarmCommands) -> None:
    task, elsewhere = short_dir / "task", short_dir / "elsewhere"
    for folder in (task, elsewhere):
        folder.mkdir()
    write_run(task, "qwen2", [{"prompt": f"{i}+1="} for i in range(40)], REWARD, trainer={"max_steps": STEPS})
    text = (task / "run.yaml").read_text()
    (task / "run.yaml").write_text(text.replace(f"{task}/", ""))
    assert yaml.safe_load(text)["run_dir"] == f"{task}/run"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"TTY_COMPATIBLE": "1", "TERM": "xterm", "NO_COLOR": "1"} | warm.variables
    command = [warm.python, *COMMAND, "--config", "../task/run.yaml"]
    with (short_dir / "log").open("wb") as log:
        pair = subprocess.Popen(command, cwd=elsewhere, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not rotated_lines.read(task / "run/steps.jsonl"):
            assert pair.poll() is None, (short_dir / "log").read_text()[-3000:]
            time.sleep(0.05)
        producer = producer_of(pair.pid)
        assert producer is not None
        producer.kill()
        code = pair.wait(300)
    finally:
        if pair.poll() is None:
            pair.send_signal(signal.SIGTERM)
            pair.wait(60)
    output = (short_dir / "log").read_text()
    assert code == 0, output[-3000:]
    lines = rotated_lines.read(task / "run/steps.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert re.search(r"producer +\| .*SIGKILL", output)
    assert re.search(rf"step \d+ of {STEPS} · reward", output), "what a terminal shows once a second"
    kept = {file.name for file in (task / "run").glob("*.log")}
    assert "trainer.log" in kept
    assert any(name.startswith("producer-") for name in kept)
    assert [*elsewhere.iterdir()] == []
