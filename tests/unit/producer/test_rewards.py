"""The reward pool with real worker processes: every failure is data, and no worker survives."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from producer.interfaces import LeaseFailure
from producer.rewards import RewardPool
from protocol.config_rewards import RewardsSection
from protocol.errors import ConfigError, ExitCode

Result = TypeVar("Result")

REWARDS = """
import os, signal, sys, time, math

def length(prompts, completions, completion_ids, **columns):
    print("printed by a reward function")
    os.write(1, b"and written to descriptor 1")
    return [float(len(c)) for c in completions]

def sees_columns(prompts, completions, completion_ids, answer, **rest):
    assert prompts == ["1+1="] * len(completions) and answer == ["2"] * len(completions) and rest == {}
    assert [len(ids) for ids in completion_ids] == [1, 2, 3]
    return [c == a for c, a in zip(completions, answer)]

def raises(completions, **_):
    raise ValueError("no digits in " + completions[0])

def hangs(completions, **_):
    time.sleep(60)

def exits(completions, **_):
    os._exit(3)

def segfaults(completions, **_):
    os.kill(os.getpid(), signal.SIGSEGV)

def short(completions, **_):
    return [1.0]

def scalar(completions, **_):
    return 1.0

def text(completions, **_):
    return ["1.0"] * len(completions)

def infinite(completions, **_):
    return [1.0, -math.inf, 0.0]

def above_float32(completions, **_):
    return [1.0, 1e39, 0.0]

def missing(completions, **_):
    return [None, math.nan, 1]

def system_exit(completions, **_):
    sys.exit(1)

async def asynchronous(completions, **_):
    return [0.5] * len(completions)

def moody(completions, **_):
    if completions[0] == "hang":
        time.sleep(60)
    return [float(os.getpid())] * len(completions)

NOT_A_FUNCTION = 3
"""
COMPLETIONS = ["1", "2", "345"]
IDS = [[1], [1, 2], [1, 2, 3]]


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def section(*functions: str, timeout_s: float = 20.0, num_workers: int = 1) -> RewardsSection:
    return RewardsSection.model_validate(
        {"functions": [{"function": f} for f in functions], "timeout_s": timeout_s, "num_workers": num_workers}
    )


def with_pool(rewards: RewardsSection, use: Callable[[RewardPool], Awaitable[Result]]) -> Result:
    async def body() -> Result:
        pool = RewardPool(rewards)
        try:
            await pool.start()
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(body())


def score(rewards: RewardsSection) -> np.ndarray:
    async def use(pool: RewardPool) -> np.ndarray:
        return (await pool.score("1+1=", COMPLETIONS, IDS, {"answer": "2", "prompt": "ignored"}))[0]

    return with_pool(rewards, use)


def failure(rewards: RewardsSection) -> str:
    with pytest.raises(LeaseFailure) as caught:
        score(rewards)
    assert caught.value.reason == "reward_failed"
    return caught.value.detail


def test_functions_see_what_trl_gives_them_and_fill_one_column_each(reward_file):
    rewards = score(
        section(*(f"{reward_file}:{name}" for name in ("length", "sees_columns", "asynchronous", "missing")))
    )
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(
        rewards, np.array([[1, 0, 0.5, np.nan], [1, 1, 0.5, np.nan], [3, 0, 0.5, 1]], dtype=np.float32)
    )


def test_module_form(reward_file, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(reward_file.parent))
    np.testing.assert_array_equal(score(section("my_rewards:length")), [[1.0], [1.0], [3.0]])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "ValueError: no digits in 1"),
        ("exits", "ended its worker process (exit status 3)"),
        ("segfaults", "ended its worker process (killed by SIGSEGV)"),
        ("system_exit", "ended its worker process (exit status 1)"),
        ("short", "returned 1 rewards for 3 completions"),
        ("scalar", "returned a float; return a list"),
        ("text", "reward 0 is '1.0'; return a number"),
        ("infinite", "reward 1 is -inf; return a finite number"),
        ("above_float32", "reward 1 is 1e+39; return a finite number"),
    ],
)
def test_a_failing_function_is_a_failure_that_names_it(reward_file, name, said):
    detail = failure(section(f"{reward_file}:length", f"{reward_file}:{name}"))
    assert f"my_rewards.py:{name}" in detail
    assert said in detail


def test_a_hanging_function_fails_in_time(reward_file):
    started = time.monotonic()
    detail = failure(section(f"{reward_file}:hangs", timeout_s=0.3))
    assert "rewards.timeout_s=0.3" in detail
    assert time.monotonic() - started < 10


def test_after_a_hang_the_pool_works_on_with_a_new_process(reward_file):
    async def use(pool: RewardPool):
        (first, _), (again, _) = [await pool.score("p", ["a"], [[1]], {}) for _ in range(2)]
        with pytest.raises(LeaseFailure):
            await pool.score("p", ["hang"], [[1]], {})
        replaced, _ = await pool.score("p", ["a"], [[1]], {})
        return int(first[0, 0]), int(again[0, 0]), int(replaced[0, 0])

    first, again, replaced = with_pool(section(f"{reward_file}:moody", timeout_s=1.0), use)
    assert first == again != replaced
    for process_id in (first, replaced):
        assert not os.path.exists(f"/proc/{process_id}")


def test_workers_score_side_by_side(reward_file):
    async def use(pool: RewardPool):
        return await asyncio.gather(*(pool.score("p", ["hang"], [[1]], {}) for _ in range(2)), return_exceptions=True)

    started = time.monotonic()
    results = with_pool(section(f"{reward_file}:moody", timeout_s=1.0, num_workers=2), use)
    assert all(isinstance(result, LeaseFailure) for result in results)
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_such_module_at_all:reward", "No module named 'no_such_module_at_all'"),
        ("{folder}/absent.py:reward", "there is no file"),
        ("{folder}/my_rewards.py:nothing", "has no `nothing`"),
        ("{folder}/my_rewards.py:NOT_A_FUNCTION", "is not a function"),
        ("{folder}/broken.py:reward", "SyntaxError"),
        ("{folder}/leaves.py:reward", "exit status 5"),
    ],
)
def test_what_cannot_be_imported_is_refused_at_the_start(reward_file, spec, said):
    folder = reward_file.parent
    (folder / "broken.py").write_text("def reward(:\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(ConfigError) as caught:
        score(section(spec.format(folder=folder)))
    assert caught.value.exit_code == ExitCode.CONFIG
    assert "rewards.functions" in str(caught.value)
    assert said in str(caught.value)
