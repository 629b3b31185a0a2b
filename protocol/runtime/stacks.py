"""Stacks of a process that does not go on, for its log.

Guarantee: each thread is one record, with where it stands; so is each of the first tasks of the event loop of this thread.
"""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_MOST_THREADS, _MOST_TASKS = 64, 64


def log_stacks(why: str) -> None:
    """Log where every thread stands, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    logger.error("%s: where its threads stand", why)
    for number, frame in list(sys._current_frames().items())[:_MOST_THREADS]:
        logger.error("thread %s:\n%s", names.get(number, number), "".join(traceback.format_stack(frame)))
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # this thread runs no loop
        return
    for task in list(tasks)[:_MOST_TASKS]:
        lines = [f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" for frame in _awaiting(task)]
        logger.error("task %s:\n%s", task.get_name(), "\n".join(lines))


def _awaiting(task: "asyncio.Task[Any]") -> Iterator[FrameType]:
    """Yield the frames of a task's coroutines, each of which awaits the next one."""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame
        coroutine = coroutine.cr_await
