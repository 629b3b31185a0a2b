"""The reward pool with real worker processes: every failure is data, and no worker survives."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from producer.interfaces import LeaseFailure
from producer.rewards.pool import RewardPool
from protocol.config.sections.rewards import RewardsSection
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

def fails_twice(completions, **_):
    with open(__file__ + ".calls", "a") as calls:
        calls.write("x")
        if calls.tell() < 3:
            raise ConnectionError("not yet")
    return [7.0] * len(completions)

def eats(completions, **_):
    block = bytearray(400 * 2**20)
    time.sleep(60)

def alarm(completions, **_):
    def over(*_):
        raise TimeoutError("by alarm")
    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(60)
    except TimeoutError:
        return [0.25] * len(completions)

MET = []

async def meets(completions, **_):
    import asyncio
    MET.append(1)
    while len(MET) < 2:
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)

async def meets_too(completions, **_):
    return await meets(completions)

async def never(completions, **_):
    import asyncio
    await asyncio.sleep(60)

async def blocks(completions, **_):
    time.sleep(60)

NOT_A_FUNCTION = 3
"""
COMPLETIONS = ["1", "2", "345"]
IDS = [[1], [1, 2], [1, 2, 3]]


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def section(*functions: str | dict[str, Any], timeout_s: float = 20.0, **values: Any) -> RewardsSection:
    entries = [{"function": f} if isinstance(f, str) else f for f in functions]
    return RewardsSection.model_validate({"functions": entries, "timeout_s": timeout_s, "num_workers": 1, **values})


class Seen:
    """What the pool says of its functions."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failures: list[tuple[str, str, int]] = []

    def reward_called(self, function: str, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append(function)

    def reward_failed(self, function: str, reason: str, num_completions: int) -> None:
        self.failures.append((function, reason, num_completions))


def with_pool(
    rewards: RewardsSection, use: Callable[[RewardPool], Awaitable[Result]], seen: Seen | None = None
) -> Result:
    async def body() -> Result:
        pool = RewardPool(rewards, seen)
        try:
            await pool.start()
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(body())


def score(rewards: RewardsSection, seen: Seen | None = None) -> np.ndarray:
    async def use(pool: RewardPool) -> np.ndarray:
        return (await pool.score("1+1=", COMPLETIONS, IDS, {"answer": "2", "prompt": "ignored"}))[0]

    return with_pool(rewards, use, seen)


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
        ("exits", "lost its worker: its process ended (exit status 3)"),
        ("segfaults", "lost its worker: its process ended (killed by SIGSEGV)"),
        ("system_exit", "lost its worker: its process ended (exit status 1)"),
        ("short", "returned 1 rewards for 3 completions"),
        ("scalar", "returned a float; return a list"),
        ("text", "reward 0 is '1.0'; return a number"),
    ],
)
def test_a_group_that_nothing_scored_is_a_failure_that_names_the_function(reward_file, name, said):
    detail = failure(section(f"{reward_file}:{name}"))
    assert f"my_rewards.py:{name}" in detail
    assert said in detail


def test_a_hanging_function_fails_in_time(reward_file):
    started = time.monotonic()
    detail = failure(section(f"{reward_file}:hangs", timeout_s=0.3))
    assert "did not return within 0.3 seconds" in detail
    assert time.monotonic() - started < 10


def test_a_function_that_failed_is_missing_and_the_others_count(reward_file, caplog):
    seen = Seen()
    rewards = score(
        section(*(f"{reward_file}:{name}" for name in ("length", "exits", "fails_twice")), num_workers=2), seen
    )
    np.testing.assert_array_equal(rewards, [[1, np.nan, np.nan], [1, np.nan, np.nan], [3, np.nan, np.nan]])
    assert sorted(seen.failures) == [("exits", "crashed", 3), ("fails_twice", "raised", 3)]
    assert sorted(seen.calls) == ["exits", "fails_twice", "length"]
    assert "reward exits is missing for 3 completions of prompt '1+1=' (crashed)" in caplog.text


@pytest.mark.parametrize(("name", "said"), [("infinite", "is -inf"), ("above_float32", "is 1e+39")])
def test_a_completion_without_one_of_its_rewards_is_left_out_because_sums_would_not_compare(
    reward_file, caplog, name, said
):
    seen = Seen()
    rewards = score(section(f"{reward_file}:length", f"{reward_file}:{name}"), seen)
    np.testing.assert_array_equal(rewards, [[1, 1], [np.nan, np.nan], [3, 0]])
    assert seen.failures == [(name, "invalid", 1)]
    assert f"reward 1 {said}; return a finite number" in caplog.text


def test_retries(reward_file, monkeypatch):
    monkeypatch.setattr("producer.rewards.pool._FIRST_PAUSE_S", 0.01)
    seen = Seen()
    rewards = score(section({"function": f"{reward_file}:fails_twice", "retries": 2}), seen)
    np.testing.assert_array_equal(rewards, [[7.0]] * 3)
    assert (seen.calls, seen.failures) == (["fails_twice"] * 3, [])


def test_a_function_has_the_main_thread_and_its_alarms(reward_file):
    np.testing.assert_array_equal(score(section(f"{reward_file}:alarm")), [[0.25]] * 3)


def test_asynchronous_functions_wait_side_by_side_in_one_worker(reward_file):
    rewards = score(section(*(f"{reward_file}:{name}" for name in ("meets", "meets_too", "asynchronous"))))
    np.testing.assert_array_equal(rewards, [[1, 1, 0.5]] * 3)


@pytest.mark.long
def test_of_asynchronous_functions_the_one_that_hangs_is_named_whether_it_waits_or_blocks(reward_file, monkeypatch):
    monkeypatch.setattr("producer.rewards.processes._ASYNC_GRACE_S", 0.1)
    seen = Seen()
    entries = [{"function": f"{reward_file}:{name}", "timeout_s": 1.5} for name in ("never", "asynchronous")]
    np.testing.assert_array_equal(score(section(*entries), seen), [[np.nan, 0.5]] * 3)
    assert seen.failures == [("never", "timeout", 3)]
    seen = Seen()
    entries[0]["function"] = f"{reward_file}:blocks"
    np.testing.assert_array_equal(score(section(*entries), seen), [[np.nan, 0.5]] * 3)
    assert seen.failures == [("blocks", "timeout", 3)]


def test_a_function_that_takes_too_much_memory_is_killed(reward_file):
    seen = Seen()
    rewards = score(section(f"{reward_file}:length", f"{reward_file}:eats", max_memory_bytes=200 * 2**20), seen)
    np.testing.assert_array_equal(rewards, [[1, np.nan], [1, np.nan], [3, np.nan]])
    assert seen.failures == [("eats", "memory", 3)]


@pytest.mark.long
def test_after_a_hang_the_pool_works_on_with_a_new_process(reward_file):
    async def use(pool: RewardPool):
        (first, _), (again, _) = [await pool.score("p", ["a"], [[1]], {}) for _ in range(2)]
        with pytest.raises(LeaseFailure):
            await pool.score("p", ["hang"], [[1]], {})
        replaced, _ = await pool.score("p", ["a"], [[1]], {})
        return int(first[0, 0]), int(again[0, 0]), int(replaced[0, 0])

    first, again, replaced = with_pool(section(f"{reward_file}:moody", timeout_s=2.0), use)
    assert first == again != replaced
    for process_id in (first, replaced):
        assert not os.path.exists(f"/proc/{process_id}")


@pytest.mark.long
def test_workers_score_side_by_side(reward_file):
    async def use(pool: RewardPool):
        return await asyncio.gather(*(pool.score("p", ["hang"], [[1]], {}) for _ in range(2)), return_exceptions=True)

    started = time.monotonic()
    results = with_pool(section(f"{reward_file}:moody", timeout_s=2.0, num_workers=2), use)
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
