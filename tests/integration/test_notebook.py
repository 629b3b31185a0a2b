"""The notebook of the demo, executed from its first cell to its last, with few steps."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from slipstream import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(540)]

FILE = Path(__file__).parents[2] / "examples" / "arithmetic" / "notebook.ipynb"


def test_every_cell_of_the_notebook_runs(short_dir: Path) -> None:
    notebook = nbformat.read(FILE, as_version=4)
    (first,) = [cell for cell in notebook.cells if "STEPS, RUN_DIR =" in cell.source]
    first.source = first.source.replace('60, Path("runs/notebook")', f'3, Path("{short_dir}/run")')
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(FILE.parent)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert len(Run(short_dir / "run").steps()) == 3
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    (table,) = [output.data["text/plain"] for output in shown if "answered_by" in str(output.get("data", {}))]
    assert "1.0" in table
    assert "0.0" in table
    assert "finished at step 3" in [output.data["text/plain"] for output in shown if output.get("data")]
    assert any("right before" in output.get("text", "") for output in shown)
