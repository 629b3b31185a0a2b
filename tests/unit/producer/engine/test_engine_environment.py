"""vLLM's settings that the engine room makes before vLLM is imported."""

import os
import subprocess
import sys

import pytest

NAMES = ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE")
SHOW = f"import os, producer.engine.own_arguments; print(*(os.environ[name] for name in {NAMES}))"


@pytest.mark.long
@pytest.mark.parametrize(("given", "found"), [({}, "ERROR 1 1"), ({"VLLM_CPU_KVCACHE_SPACE": "4"}, "ERROR 1 4")])
def test_an_engine_is_quiet_reports_nothing_and_leaves_memory_unless_a_user_decides(
    given: dict[str, str], found: str
) -> None:
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", SHOW]
    shown = subprocess.run(command, env=others | given, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.strip() == found
