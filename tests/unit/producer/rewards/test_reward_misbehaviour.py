"""Rewards that do what rewards should not, in real workers: each costs its own column and leaves nothing behind."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from producer.environments.contract import EnvironmentFailedError
from producer.environments.pool import EnvironmentPool
from producer.rewards.pool import RewardPool
from protocol.config.rewards import EnvironmentSection
from tests.unit.producer.rewards.test_rewards import Seen, section

MARK = "SLIPSTREAM_TEST_MARK"
LOG_BYTES = 200_000

GOOD = """
import ctypes, os, signal, subprocess, sys, threading, time

def good(completions, **_):
    return [1.0] * len(completions)

def prints_much(completions, **_):
    for _ in range(50):
        print("x" * 2**20)
    return good(completions)

def prints_often(completions, **_):
    for number in range(20_000):
        print("line", number, flush=True)
    return good(completions)

def writes_natively(completions, **_):
    ctypes.CDLL(None).write(1, b"from C\\n", 7)
    os.write(2, b"to descriptor 2\\n")
    subprocess.run(["echo", "from a child"], check=True)
    return good(completions)

def prints_in_a_thread(completions, **_):
    def forever():
        while True:
            print("from a thread")
            time.sleep(0.001)
    threading.Thread(target=forever, daemon=True).start()
    return good(completions)

def leaves_children(completions, **_):
    for _ in range(20):
        subprocess.Popen(["sleep", "600"])
    return good(completions)

def leaves_daemons(completions, **_):
    for command in ("setsid sleep 600 &", "setsid sh -c 'trap \\"\\" TERM HUP; sleep 600 & sleep 600' &"):
        subprocess.run(["sh", "-c", command], check=True)
    return good(completions)

def returns_twice(completions, **_):
    os.fork()
    return good(completions)
"""
BAD = """
from good import *

def exits(completions, **_):
    leaves_daemons(completions)
    os._exit(3)

def sys_exit(completions, **_):
    sys.exit("enough")

def segfaults(completions, **_):
    ctypes.string_at(0)

def raises_much(completions, **_):
    raise ValueError("\\n".join(["y" * 2**20] * 10))

def children_eat(completions, **_):
    eater = "x = bytearray(600 * 2**20); import time; time.sleep(600)"
    subprocess.run(["setsid", "--fork", sys.executable, "-c", eater])
    time.sleep(600)

def closes_everything(completions, **_):
    os.closerange(0, 1000)
    return good(completions)

def replaces_the_channel(completions, **_):
    os.closerange(3, 1000)
    kept.extend(open(os.devnull, "r+b") for _ in range(50))
    return good(completions)

kept = []

def writes_to_the_channel(completions, frame=b"\\x05\\0\\0\\0garbage", **_):
    for descriptor in range(3, 50):
        try:
            os.write(descriptor, frame)
        except OSError:
            pass
    return good(completions)

def writes_what_is_no_text(completions, **_):
    answer = b"\\x81\\xa6scores\\x91\\x82\\xa7rewards\\xc0\\xa7problem\\xa1\\xff"
    return writes_to_the_channel(completions, len(answer).to_bytes(4, "little") + answer)

def answers_for_others(completions, **_):
    answer = b"\\x81\\xa6scores\\x91\\x81\\xa7rewards\\x91\\xcb" + bytes(8)
    return writes_to_the_channel(completions, len(answer).to_bytes(4, "little") + answer)

def answers_too_much(completions, **_):
    return [1.0] * 10**7

def ends_its_group(completions, **_):
    os.killpg(0, signal.SIGTERM)
    time.sleep(600)

def hangs(completions, **_):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    leaves_daemons(completions)
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def stops_itself(completions, **_):
    os.kill(os.getpid(), signal.SIGSTOP)

def stops_its_keeper(completions, **_):
    leaves_daemons(completions)
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)

def kills_its_keeper(completions, **_):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
"""


@pytest.fixture
def folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Path]:
    """Of the rewards; whatever is started for a test carries a mark in its environment. Afterwards nothing is left of it, the
    log is short and nothing was printed."""
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    caplog.set_level(logging.INFO, logger="producer")
    descriptors = os.listdir("/proc/self/fd")
    yield tmp_path
    deadline = time.monotonic() + 10  # who inherited a killed process may not have reaped it yet
    while (left := marked(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        process.kill()
    assert left == []
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert capfd.readouterr() == ("", "")
    assert 0 < sum(len(record.getMessage()) for record in caplog.get_records("call")) < LOG_BYTES


def marked(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def names(source: str) -> list[str]:
    return [line.split()[1].split("(")[0] for line in source.splitlines() if line.startswith("def ")]


@pytest.mark.long
def test_misbehaviour_costs_nothing_but_its_reward(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("protocol.runtime.child._KEEPER_S", 0.5)  # of one that was stopped
    good, bad = names(GOOD), names(BAD)
    hanging = {"hangs", "stops_itself", "stops_its_keeper"}
    functions: list[dict[str, Any]] = [
        {"function": f"bad:{name}", "timeout_s": 1.5 if name in hanging else 60.0} for name in bad
    ]
    functions += [{"function": f"good:{name}"} for name in good]  # after the others, in workers that replace theirs

    async def body() -> None:
        rewards = section(*functions, num_workers=2, timeout_s=60.0, max_memory_bytes=400 * 2**20)
        pool = RewardPool(rewards, Seen())
        try:
            await pool.start()
            assert marked(folder)
            scores, *_ = await pool.score("p", ["a", "b"], [[1], [2]], {})
            found = dict(zip(bad + good, scores[0].tolist(), strict=True))
            assert {name for name, reward in found.items() if np.isnan(reward)} == set(bad), found
            assert pool.num_idle == pool.num_workers
        finally:
            await pool.close()

    started = time.monotonic()
    asyncio.run(body())
    assert time.monotonic() - started < 250
    said = caplog.text
    assert "reward prints_much wrote: xxx" in said
    for text in ("from C", "to descriptor 2", "from a child"):
        assert text in said
    assert sum("Traceback" in message for message in caplog.messages) <= 2 * len(bad)
    for name in ("closes_everything", "replaces_the_channel"):
        lines = [message for message in caplog.messages if message.startswith(f"reward {name} wrote")]
        assert len(lines) <= 1, lines
        assert not any("Traceback" in line for line in lines)
    assert "reward replaces_the_channel wrote: descriptor" in said
    assert "the connection to the daemon, was closed by code that runs here" in said


@pytest.mark.long
def test_misbehaviour_of_environments_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    methods = "".join(f"    def {name}(self):\n        return bad.{name}(['c'])\n" for name in names(GOOD + BAD))
    (folder / "shop.py").write_text(f"import bad\nclass Shop:\n    def reset(self, **_): print('open')\n{methods}")
    calls = ["leaves_daemons", "prints_much", "exits", "segfaults", "closes_everything", "hangs", "kills_its_keeper"]
    settings = {"factory": "shop:Shop", "tool_parser": "hermes", "call_timeout_s": 3.0, "max_concurrent": 2}

    async def body() -> None:
        pool = EnvironmentPool(EnvironmentSection.model_validate(settings))
        try:
            for name in calls:
                async with pool.session() as environment:
                    await environment.reset({})
                    assert marked(folder)
                    with contextlib.suppress(EnvironmentFailedError):
                        assert (await environment.call(name, {}))[0] in ("[1.0]", [1.0]), name
        finally:
            await pool.close()

    asyncio.run(body())
    assert "environment shop:Shop wrote: open" in caplog.text
