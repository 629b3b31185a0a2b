"""Engine cores and their workers without an import of vLLM each: on a CPU vLLM spawns them, and they compute for some ten
seconds; beside a GPU it forks them, and within `forked_cores` it does so here too. On a CPU they compile nothing either: with
`enforce_eager` that is a helper of a line for the ranks of log-probs, which takes two seconds.
"""

import functools
import gc
import importlib
import logging
import logging.config
import multiprocessing.context
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
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


@functools.cache
def _prepare() -> None:
    """What each core would do anew. Of the kernels it looks for references in every module that there is."""
    for name in ("torch._dynamo", "vllm.v1.worker.cpu_worker", "compressed_tensors"):
        importlib.import_module(name)
    platform = importlib.import_module("vllm.platforms").current_platform
    with warnings.catch_warnings():  # it touches whatever is deprecated
        warnings.simplefilter("ignore")
        platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = lambda: None


def _configure(settings: dict[str, Any]) -> None:
    """As `dictConfig`, which forgets what all loggers know of their levels once for each of hundreds that there are already."""
    with mock.patch.object(logging.Manager, "_clear_cache"):
        logging.config.dictConfig(settings)
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]


@contextmanager
def forked_cores() -> Iterator[None]:
    if _is_cpu():
        _prepare()
    with (
        mock.patch("vllm.logger.dictConfig", _configure),
        warnings.catch_warnings(),
        mock.patch("vllm.v1.engine.utils.get_mp_context", return_value=_Context()),
        mock.patch("vllm.v1.executor.multiproc_executor.get_mp_context", return_value=_Context()),
    ):
        # Python 3.12 and newer warn of the threads that a fork does not have; vLLM's core needs none of them.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield
