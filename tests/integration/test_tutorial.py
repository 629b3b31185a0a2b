"""Every file and every command of docs/tutorial.md, in an empty folder, on a small local model."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from getpass import getuser
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch

from protocol.runtime import json_lines as rotated_lines
from tests.integration.models import build_model, reference_logprobs
from tests.integration.warm_commands import WarmCommands
from tests.unit.protocol.channel_harness import reserve_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(540)]

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(?P<language>\w+)(?: (?P<file>\S+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(folder: Path, python: str = sys.executable) -> Path:
    """A folder of the project's commands, whether or not this checkout is the one that is installed."""
    folder.mkdir()
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    modules = {"slipstream": "slipstream"}  # the package's own __main__
    arguments = {name: f"-m {modules.get(name, place.partition(':')[0])}" for name, place in scripts.items()} | {
        "python": ""
    }
    for name, before in arguments.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{python}" {before} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def test_the_tutorial(short_dir: Path, warm: WarmCommands, stack: ExitStack) -> None:
    blocks = list(BLOCK.finditer((REPOSITORY / "docs" / "tutorial.md").read_text()))
    folder = short_dir / "task"
    folder.mkdir()
    build_model("llama", folder / "model")
    script, port = [], str(reserve_port(stack))  # for minutes, until a server is there
    for block in blocks:
        if block["file"]:
            fewer = block["text"].replace("max_steps: 20", "max_steps: 8").replace("save_steps: 10", "save_steps: 4")
            (folder / block["file"]).write_text(fewer)
        else:
            assert block["language"] == "sh", "a block is a file or commands"
            # A daemon that fails ends the wait for it; the other one would wait on.
            script.append(
                re.sub(r"^wait$", "while wait -n; do :; done", block["text"].replace("8000", port), flags=re.M)
            )
    environment = os.environ | warm.variables
    environment |= {
        "PATH": f"{commands(short_dir / 'bin', warm.python)}:{os.environ['PATH']}",
        "HF_DATASETS_CACHE": str(short_dir / "cache"),
        "TMPDIR": str(short_dir),  # vLLM's server leaves its sockets there
        "TORCHINDUCTOR_CACHE_DIR": f"{gettempdir()}/torchinductor_{getuser()}",  # torch's own
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, not half the memory
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (short_dir / "log").open("ab") as log:
        shell = subprocess.Popen(
            ["bash", "-exuo", "pipefail", "-c", "\n".join(script)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = shell.wait(480)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the daemons are of its group and may outlive it
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait(10)
    logs = {name: (folder / name).read_text() for name in ("run.log", "vllm.log") if (folder / name).exists()}
    output = (short_dir / "log").read_text()
    assert code == 0, "\n".join(text[-3000:] for text in (*logs.values(), output))
    assert f"slipstream sft: wrote {folder}/runs/larger/sft" in output
    assert "rl-trainer: finished at step 8 of 8" in output
    merged = f"slipstream export: {folder}/runs/larger/adapter merged into {folder}/model: {folder}/larger"
    assert f"{merged}; log-probs agree to" in output
    answered = json.JSONDecoder().raw_decode(output, output.index('{"id":'))[0]["choices"][0]["message"]["content"]
    assert answered in output.split("+ python use.py")[1].splitlines(), "vLLM says what use.py does"
    steps = rotated_lines.read(folder / "runs/larger/steps.jsonl")
    assert [step["step"] for step in steps] == list(range(1, 9))
    tokens = ([5, 6, 7], [8, 9, 10])
    merged = reference_logprobs(folder / "larger", None, *tokens, 1.0)
    adapted = reference_logprobs(folder / "model", folder / "runs/larger/adapter", *tokens, 1.0)
    torch.testing.assert_close(merged, adapted, atol=1e-3, rtol=0)
