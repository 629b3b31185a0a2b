"""The script that takes one prompt through every part: it runs as its first line says, and says what came of each part."""

import re
from pathlib import Path

import pytest

from .warm import run_to_its_end

pytestmark = pytest.mark.integration


def test_one_prompt_from_its_lease_to_the_swap(tmp_path: Path) -> None:
    output = run_to_its_end("docs.one_step", [], tmp_path / "log", 280)
    said = re.findall(r"^(publish|swap|lease|generate|reward|journal|cut|step) +(.*)$", output, re.MULTILINE)
    parts = [part for part, _ in said]
    assert parts == [
        *("publish", "swap", "lease", "generate", "reward", "journal", "cut", "step", "publish", "swap")
    ], output
    words = dict(said)  # of two parts of one name, the second
    assert words["journal"].endswith("accepted")
    assert words["cut"].startswith("1 group for step 1")
    assert float(re.search(r"gradient norm ([\d.]+)", words["step"]).group(1)) > 0
    assert words["swap"] == "version 1: live, and computes what the trainer does"
