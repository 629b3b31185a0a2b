"""A command on `protocol.service.command_line` that says what it was given, fails with seed 1 and is interrupted with seed 2.

As a process, `python -m tests.unit.protocol.stub_command`, it also fails if anything heavy was imported.
"""

import os
import sys

from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ExitCode
from protocol.service.command_line import main, parser

HEAVY = ("torch", "vllm", "trl", "transformers", "peft", "datasets", "numpy", "uvicorn", "starlette")


def _check_libraries(config: RunConfig) -> None:
    raise ConfigError("engine.max_model_len: refused by vllm")


def _run(config: RunConfig, gpus: list[int]) -> ExitCode:
    print("running on", gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    if config.seed == 1:
        raise KeyError("a bug")
    if config.seed == 2:
        raise KeyboardInterrupt
    return ExitCode.OK


def rl_stub(arguments: list[str] | None = None) -> int:
    return main(parser("rl-stub", "A stub.").parse_args(arguments), "rl-stub", _check_libraries, _run)


if __name__ == "__main__":
    try:
        code = rl_stub()
    finally:
        heavy = [name for name in HEAVY if name in sys.modules]
        assert not heavy, heavy
    sys.exit(code)
