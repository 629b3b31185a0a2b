"""The notebook of the demo, executed from its first cell to its last, with few steps."""

import os
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from slipstream import Run
from tests.integration.browser import until
from tests.integration.warm_commands import WarmCommands

pytestmark = [pytest.mark.integration, pytest.mark.timeout(800)]

FILE = Path(__file__).parents[2] / "examples" / "arithmetic" / "notebook.ipynb"


def test_every_cell_of_the_notebook_runs(short_dir: Path, warm: WarmCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm.python)  # of the kernel too
    notebook = nbformat.read(FILE, as_version=4)
    (first,) = [cell for cell in notebook.cells if "STEPS, RUN_DIR =" in cell.source]
    first.source = first.source.replace('60, Path("runs/notebook")', f'3, Path("{short_dir}/run")')
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(FILE.parent)}})
    client.execute(env=os.environ | warm.variables)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert len(Run(short_dir / "run").steps()) == 3
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    (table,) = [output.data["text/plain"] for output in shown if "answered_by" in str(output.get("data", {}))]
    assert "1.0" in table
    assert "0.0" in table
    assert "finished at step 3" in [output.data["text/plain"] for output in shown if output.get("data")]
    assert any("right before" in output.get("text", "") for output in shown)


def test_interrupting_the_kernel_ends_both_daemons_after_a_checkpoint(short_dir: Path, warm: WarmCommands) -> None:
    first, _, run = [cell.source for cell in nbformat.read(FILE, as_version=4).cells if cell.cell_type == "code"][:3]
    first = first.replace('60, Path("runs/notebook")', f'100_000, Path("{short_dir}/run")')
    first = first.replace("from examples.arithmetic.evaluate import greedy_accuracy\n", "")  # it imports torch
    reward = "def right(completions, **_):\n    return [float(len(text)) for text in completions]"
    manager, client = start_new_kernel(cwd=str(FILE.parent), env=os.environ | warm.variables)
    try:
        client.execute_interactive(f"{first}\n{reward}", timeout=200, output_hook=lambda message: None)
        asked = client.execute(run)
        steps = short_dir / "run" / "steps.jsonl"
        until(steps.is_file, "the first step", 300)  # libraries and engine start first
        until(lambda: len(steps.read_text().splitlines()) > 1, "the second step")
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=200))["parent_header"].get("msg_id") != asked:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert psutil.Process(manager.provisioner.process.pid).children(recursive=True) == []
        assert Run(short_dir / "run").adapter().name.startswith(("adapter", "checkpoint-"))
        assert Run(short_dir / "run").status()["ended"]["finished"] is False
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
