"""Engine cores and their workers without an import of vLLM each: on a CPU vLLM spawns them, and they compute for some ten
seconds; beside a GPU it forks them, and within `forked_cores` it does so here too. On a CPU they compile nothing either: with
`enforce_eager` that is a helper of a line for the ranks of log-probs, which takes two seconds.
"""

import gc
import importlib
import multiprocessing.context
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


class _Core(multiprocessing.context.ForkProcess):
    def run(self) -> None:
        warnings.simplefilter("default")  # as in a new process, whatever a test makes of them
        if _is_cpu():
            importlib.import_module("torch._dynamo").config.disable = True
        gc.unfreeze = lambda: None  # at its end vLLM would look through all that its starter has imported
        super().run()


def _is_cpu() -> bool:
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


class _Context(multiprocessing.context.ForkContext):
    Process = _Core


@contextmanager
def forked_cores() -> Iterator[None]:
    if _is_cpu():
        for name in ("torch._dynamo", "vllm.v1.worker.cpu_worker"):  # once, and not in each core
            importlib.import_module(name)
    with (
        warnings.catch_warnings(),
        mock.patch("vllm.v1.engine.utils.get_mp_context", return_value=_Context()),
        mock.patch("vllm.v1.executor.multiproc_executor.get_mp_context", return_value=_Context()),
    ):
        # Python 3.12 and newer warn of the threads that a fork does not have; vLLM's core needs none of them.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield
