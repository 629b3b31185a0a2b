"""A Python whose daemons start at once: it stands for a fork of a warm process, with its output, signals and end.

Run as `python -I -S warm_python.py PYTHON SOCKET ARGUMENTS...`; SOCKET is that of `tests.integration.warm_commands`. PYTHON runs
what needs no heavy library.
"""

import json
import os
import signal
import socket
import sys
from typing import NoReturn

_MODULES = {
    "benchmarks.async_trl": "trainer",
    "benchmarks.gpu_check.part": "producer",
    "benchmarks.trainer_step_side": "trainer",
    "consumer.app.cli": "trainer",
    "docs.traced_daemon rl-producer": "producer",
    "docs.traced_daemon rl-trainer": "trainer",
    "docs.walks": "trainer",
    "examples.arithmetic.build_model": "trainer",
    "examples.calculator.demo": "trainer",
    "examples.calculator.build_model": "trainer",
    "ipykernel_launcher": "trainer",
    "producer.app.cli": "producer",
    "slipstream export": "trainer",
    "slipstream reward": "producer",
    "slipstream sft": "trainer",
    "vllm.entrypoints.openai.api_server": "producer",
}
"""The role whose warm process has the libraries of a module, or of one that begins with this argument."""
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(python: str, address: str, arguments: list[str]) -> NoReturn:
    command = arguments[arguments.index("-m") if "-m" in arguments[:3] else 0 :]
    roles = [_MODULES[module] for module in (" ".join(command[1:3]), *command[1:2]) if module in _MODULES]
    if command[:1] != ["-m"] or not roles:
        os.execv(python, [python, *arguments])
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)  # until the request has left, which comes first
    for number in _HANDED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    request = {"role": roles[0], "argv": command[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}
    server.sendall(json.dumps(request | {"pid": os.getpid()}).encode() + b"\n")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
    status = int(server.makefile().readline())
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
