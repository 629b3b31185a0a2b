"""What importing costs: the trainer stays without vLLM."""

import subprocess
import sys


def test_importing_the_trainers_does_not_import_vllm() -> None:
    """TRL imports it where it is installed, which takes seconds, memory and, with another release, a warning."""
    code = "import sys, consumer.learn.trainer, slipstream.sft; print('vllm' in sys.modules)"
    checked = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (checked.stdout, checked.returncode) == ("False\n", 0), checked.stderr
