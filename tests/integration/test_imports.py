"""What importing costs: the trainer stays without vLLM."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["consumer.learn.trainer", "slipstream.sft"])
def test_importing_a_trainer_does_not_import_vllm(module: str) -> None:
    """TRL imports it where it is installed, which takes seconds, memory and, with another release, a warning."""
    code = f"import sys, {module}; print('vllm' in sys.modules)"
    checked = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (checked.stdout, checked.returncode) == ("False\n", 0), checked.stderr
