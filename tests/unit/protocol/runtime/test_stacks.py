"""Where a process stands, in its log."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from protocol.runtime.health import Health, Notifier
from protocol.runtime.stacks import log_stacks

REPOSITORY = Path(__file__).parents[4]


def test_every_thread_and_task_is_a_record(caplog: pytest.LogCaptureFixture) -> None:
    leave, is_there = threading.Event(), threading.Event()

    def stands_here() -> None:
        is_there.set()
        leave.wait()

    thread = threading.Thread(target=stands_here, name="the other")
    thread.start()
    is_there.wait()

    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    async def work() -> None:
        task = asyncio.create_task(outer(), name="a rollout")
        await asyncio.sleep(0)
        log_stacks("no progress for 5 s")
        task.cancel()

    asyncio.run(work())
    leave.set()
    thread.join()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("no progress for 5 s")
    assert any(text.startswith("thread the other:") and "in stands_here" in text for text in messages)
    assert any(text.startswith("thread MainThread:") and "log_stacks" in text for text in messages)
    [of_task] = [text for text in messages if text.startswith("task a rollout:")]
    assert [line.split()[-1] for line in of_task.splitlines()[1:]] == ["outer", "inner", "wait"]


def test_a_loop_that_is_late_has_stacks_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    health = Health(5.0, Notifier(None), lambda: now[0])
    health.beat("intake")
    health.alive()
    assert not caplog.records
    now[0] = 6.0
    health.alive()
    health.alive()
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("intake loop")]
    assert said == [
        "intake loop has not come round for 6 s (observability.unresponsive_after_s=5): where its threads stand"
    ]


@pytest.mark.long
@pytest.mark.parametrize("module", ["consumer.app.cli", "producer.app.cli"])
def test_the_watchdog_of_systemd_leaves_stacks(module: str) -> None:
    program = (
        f"import os, signal, sys\nfrom protocol import command_line\nfrom {module} import main\n"
        "def stuck(*given, **more):\n    os.kill(os.getpid(), signal.SIGABRT)\n"
        "import protocol.check.whole\nprotocol.check.whole.check_library_sections = stuck\n"
        "sys.argv[1:] = ['--config', 'run.yaml', '--gpu', 'cpu']\nmain()"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.stderr
    assert "in stuck" in ended.stderr
