"""The script that takes one prompt through every part: it runs as its first line says, and says what came of each part."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]


def test_one_prompt_from_its_lease_to_the_swap() -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "docs.one_step"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(r"^(publish|swap|lease|generate|reward|journal|cut|step) +(.*)$", done.stdout, re.MULTILINE)
    parts = [part for part, _ in said]
    assert parts == [
        *("publish", "swap", "lease", "generate", "reward", "journal", "cut", "step", "publish", "swap")
    ], done.stdout
    words = dict(said)  # of two parts of one name, the second
    assert words["journal"].endswith("accepted")
    assert words["cut"].startswith("1 group for step 1")
    assert float(re.search(r"gradient norm ([\d.]+)", words["step"]).group(1)) > 0
    assert words["swap"] == "version 1: live, and computes what the trainer does"
