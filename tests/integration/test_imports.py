"""What importing costs: the trainer stays without vLLM."""

from pathlib import Path

import pytest

from tests.integration.warm import run_to_its_end

pytestmark = pytest.mark.integration


def test_importing_the_trainers_does_not_import_vllm(tmp_path: Path) -> None:
    """TRL imports it where it is installed, which takes seconds, memory and, with another release, a warning."""
    said = run_to_its_end("tests.integration.importing_trainer", [], tmp_path / "log", 120)
    assert said.splitlines()[-1] == "without vLLM"
