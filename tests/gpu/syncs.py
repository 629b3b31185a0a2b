"""Where the host waits for the GPU within a call.

Guarantee: what Triton's interpreter and the stand-ins for attention copy to the host is left out, because a GPU runs the kernel
itself. Operators of a backward pass are not seen, because they run in another thread.
"""

import functools
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.stand_in import cuda

REPOSITORY = Path(__file__).parents[2]
_STAND_INS = ("triton/runtime/*.py", "stand_in/packages/flash_attn/*.py", "stand_in/flex.py")


class Syncs(TorchDispatchMode):
    """Counts waits in the calls that are watched, by operator and the line of ours that asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.num_calls = 0

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            with self:
                return function(*arguments, **options)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = cuda.install().num_syncs
        result = func(*args, **(kwargs or {}))
        if cuda.install().num_syncs > before:
            frames = traceback.extract_stack()
            if not any(Path(frame.filename).match(own) for frame in frames for own in _STAND_INS):
                self.found[f"{func} at {_line_of_ours(frames)}"] += 1
        return result


def _line_of_ours(frames: traceback.StackSummary) -> str:
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(REPOSITORY / "consumer")]
    if not ours:
        return "a library"
    return f"{Path(ours[-1].filename).relative_to(REPOSITORY)}:{ours[-1].lineno}"
