"""Triton's interpreter in less time: the same kernels, grids and numbers.

Guarantee: what a launch does beside its kernel is left out. The language is prepared once and not at each launch and call; sums
of indices are not computed again to see whether they overflow, as on a GPU; and the stand-in's memory is read where it lies.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Change the interpreter of this process, for good. TRITON_INTERPRET is set before."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    prepare = interpreter._patch_lang

    @functools.cache
    def prepared(function: Callable[..., Any]) -> Any:
        prepare(function)
        return interpreter._LangPatchScope()  # which has nothing to take back

    interpreter._patch_lang = prepared
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, named: (arguments, named)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
