"""What a worker makes of its functions, and the reward pool with real workers: every failure is data, and no worker survives."""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from producer.groups import LeaseFailure
from producer.rewards.messages import Job
from producer.rewards.pool import MAX_FAILURES, RewardFailures, RewardPool
from producer.rewards.worker import Made, _score
from protocol.config.rewards import RewardsSection
from protocol.errors import ConfigError, DeviceError
from protocol.wire.messages import MissingReward
from tests.unit.producer.loop import until

Result = TypeVar("Result")

REWARDS = """
import asyncio, math, os, signal, time

def length(prompts, completions, completion_ids, **columns):
    print("printed by a reward function")
    os.write(1, b"and written to descriptor 1")
    return [float(len(c)) for c in completions]

def sees_columns(prompts, completions, completion_ids, answer, **rest):
    assert prompts == ["1+1="] * len(completions) and answer == ["2"] * len(completions)
    assert rest.keys() == {"trainer_state", "log_extra", "log_metric"}
    assert [len(ids) for ids in completion_ids] == [1, 2, 3]
    return [c == a for c, a in zip(completions, answer)]

def exits(completions, **_):
    os._exit(3)

def infinite(completions, **_):
    return [1.0, -math.inf, 0.0]

def missing(completions, **_):
    return [None, math.nan, 1]

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
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while True:  # a signal just before a sleep does not end it
            time.sleep(0.02)
    except TimeoutError:
        return [0.25] * len(completions)

MET = []

async def meets(completions, **_):
    MET.append(1)
    while len(MET) < 2:
        await asyncio.sleep(0.01)
    return [float(len(MET))] * len(completions)

async def meets_too(completions, **_):
    return await meets(completions)

async def never(completions, **_):
    await asyncio.sleep(60)

async def blocks(completions, **_):
    time.sleep(60)
"""
COMPLETIONS = ["1", "2", "345"]
IDS = [[1], [1, 2], [1, 2, 3]]


@pytest.fixture
def rewards_of(tmp_path: Path) -> Callable[..., RewardsSection]:
    """Makes a section of functions of `REWARDS`, by name; `entry` holds settings of each."""
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)

    def made(*names: str, entry: dict[str, Any] | None = None, **values: Any) -> RewardsSection:
        return section(*({"function": f"{path}:{name}"} | (entry or {}) for name in names), **values)

    return made


def section(*functions: str | dict[str, Any], timeout_s: float = 20.0, **values: Any) -> RewardsSection:
    entries = [{"function": f} if isinstance(f, str) else f for f in functions]
    return RewardsSection.model_validate({"functions": entries, "timeout_s": timeout_s, "num_workers": 1, **values})


class Seen:
    """What the pool says of its functions."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failures: list[tuple[str, str, int]] = []
        self.missing: tuple[MissingReward, ...] = ()

    def reward_called(self, function: str, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append(function)

    def reward_failed(self, function: str, reason: str, num_completions: int) -> None:
        self.failures.append((function, reason, num_completions))


def with_pool(
    rewards: RewardsSection, use: Callable[[RewardPool], Awaitable[Result]], seen: Seen | None = None
) -> Result:
    async def body() -> Result:
        pool = RewardPool(rewards, seen or Seen())
        try:
            await pool.start()
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(body())


def score(rewards: RewardsSection, seen: Seen | None = None) -> np.ndarray:
    async def use(pool: RewardPool) -> np.ndarray:
        rewards, _, failures, *_ = await pool.score("1+1=", COMPLETIONS, IDS, {"answer": "2", "prompt": "ignored"})
        seen.missing = failures.entries()
        return rewards

    seen = seen or Seen()
    return with_pool(rewards, use, seen)


class BadNumber:
    def __float__(self) -> float:
        raise OverflowError("no float")


@pytest.mark.parametrize(
    ("returned", "reason", "said"),
    [
        ([1.0], "invalid", "returned 1 rewards for 3 completions"),
        (1.0, "invalid", "returned a float; return a list"),
        (["1.0"] * 3, "invalid", "reward 0 is '1.0'; return a number"),
        ([BadNumber()] * 3, "invalid", "of type BadNumber is no number: no float"),
        ([ValueError("why"), 1e39, 1e39], "raised", "reward 0: why"),
        ([TimeoutError("slow")] * 3, "timeout", "reward 0: slow"),
        ([-math.inf] * 3, "invalid", "reward 0 is -inf; return a finite number"),
        ([1e39] * 3, "invalid", "reward 0 is 1e+39; return a finite number"),
        (ValueError("no digits"), "raised", "ValueError: no digits"),
        (MemoryError(), "memory", "ran out of memory"),
    ],
)
def test_what_a_function_returns_or_raises_is_checked(returned: Any, reason: str, said: str):
    def function(**_: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    found = _score(Made.of(function, "f"), Job("p", COMPLETIONS, IDS, {}))
    assert (found.rewards, found.reason) == (None, reason)
    assert said in found.problem


def test_completions_that_fail_alone_are_named_and_a_coroutine_is_awaited():
    job = Job("p", COMPLETIONS, IDS, {})
    found = _score(Made.of(lambda **_: asyncio.sleep(0, (True, TimeoutError("slow"), np.float32(2))), "f"), job)
    assert found.rewards == pytest.approx([1.0, math.nan, 2.0], nan_ok=True)
    assert found.failed == {1: ("timeout", "reward 1: slow")}


@pytest.mark.long
def test_functions_see_what_trl_gives_them_and_fill_one_column_each(rewards_of):
    rewards = score(rewards_of("length", "sees_columns", "asynchronous", "missing", "alarm"))
    assert rewards.dtype == np.float32
    expected = [[1, 0, 0.5, np.nan, 0.25], [1, 1, 0.5, np.nan, 0.25], [3, 0, 0.5, 1, 0.25]]
    np.testing.assert_array_equal(rewards, np.array(expected, np.float32))


@pytest.mark.long
def test_a_group_that_nothing_scored_is_a_failure_that_names_the_function(rewards_of):
    with pytest.raises(LeaseFailure) as caught:
        score(rewards_of("exits"))
    assert caught.value.reason == "reward_failed"
    assert "my_rewards.py:exits lost its worker: its process ended (exit status 3)" in caught.value.detail


@pytest.mark.long
def test_a_function_that_failed_is_missing_and_the_others_count(rewards_of, caplog):
    seen, names = Seen(), ("length", "exits", "fails_twice", "eats")
    rewards = score(rewards_of(*names, num_workers=2, max_memory_bytes=200 * 2**20), seen)
    np.testing.assert_array_equal(rewards, [[length, np.nan, np.nan, np.nan] for length in (1, 1, 3)])
    assert sorted(seen.failures) == [("eats", "memory", 3), ("exits", "crashed", 3), ("fails_twice", "raised", 3)]
    assert sorted(seen.calls) == ["eats", "exits", "fails_twice", "length"]
    assert [(one.function, one.reason, one.completions) for one in seen.missing] == [
        ("exits", "crashed", ()), ("fails_twice", "raised", ()), ("eats", "memory", ()),
    ]  # fmt: skip
    assert "reward exits is missing for 3 completions of prompt 0 ('1+1=') (crashed)" in caplog.text


@pytest.mark.long
def test_a_completion_without_one_of_its_rewards_is_left_out_because_sums_would_not_compare(rewards_of, caplog):
    seen = Seen()
    np.testing.assert_array_equal(score(rewards_of("length", "infinite"), seen), [[1, 1], [np.nan, np.nan], [3, 0]])
    assert seen.failures == [("infinite", "invalid", 1)]
    assert seen.missing == (
        MissingReward("infinite", "invalid", "reward 1 is -inf; return a finite number, or None for missing", (1,)),
    )
    assert "reward 1 is -inf; return a finite number" in caplog.text


def test_what_failed_alike_is_said_once_within_bounds():
    failures = RewardFailures()
    for row in range(3):
        failures.add("f", "timeout", "x" * 600 + "end", [row])
    for number in range(20):
        failures.add("f", "raised", f"error {number}", [number])
    found = failures.entries()
    assert len(found) == MAX_FAILURES
    assert found[0] == MissingReward("f", "timeout", "x" * 497 + "end", (0, 1, 2))
    assert found[1].completions == (0,)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=tuple[MissingReward, ...]) == found


@pytest.mark.long
def test_retries(rewards_of, monkeypatch):
    monkeypatch.setattr("producer.rewards.pool._FIRST_PAUSE_S", 0.01)
    seen = Seen()
    np.testing.assert_array_equal(score(rewards_of("fails_twice", entry={"retries": 3}), seen), [[7.0]] * 3)
    assert (seen.calls, seen.failures) == (["fails_twice"] * 3, [])


@pytest.mark.long
def test_asynchronous_functions_wait_side_by_side_in_one_worker(rewards_of):
    np.testing.assert_array_equal(score(rewards_of("meets", "meets_too", "asynchronous")), [[2, 2, 0.5]] * 3)


@pytest.mark.long
@pytest.mark.parametrize("hangs", ["never", "blocks"])
def test_of_asynchronous_functions_the_one_that_hangs_is_named_whether_it_waits_or_blocks(
    rewards_of, monkeypatch, hangs
):
    monkeypatch.setattr("producer.rewards.workers._ASYNC_GRACE_S", 0.1)
    seen = Seen()
    rewards = score(rewards_of(hangs, "asynchronous", entry={"timeout_s": 1.0}), seen)
    np.testing.assert_array_equal(rewards, [[np.nan, 0.5]] * 3)
    assert seen.failures == [(hangs, "timeout", 3)]


@pytest.mark.long
def test_groups_are_scored_side_by_side_and_after_a_hang_by_another_process(rewards_of):
    async def use(pool: RewardPool):
        async def ask(*texts: str) -> list[Any]:
            asked = (pool.score("p", [text], [[1]], {}) for text in texts)
            return await asyncio.gather(*asked, return_exceptions=True)

        asked = asyncio.ensure_future(ask("hang", "hang"))
        await until(lambda: pool.num_idle == 0)
        for failure in await asked:
            assert isinstance(failure, LeaseFailure)
            assert "did not return within 1 seconds" in failure.detail
        return [int(scored.rewards[0, 0]) for scored in [*await ask("a"), *await ask("a"), *await ask("a")]]

    first, second, third = with_pool(rewards_of("moody", timeout_s=1.0, num_workers=2), use)
    assert first == third != second, "in turn"
    assert not any(os.path.exists(f"/proc/{process_id}") for process_id in (first, second))


OUT_OF_MEMORY = """
import sys, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
raise torch.OutOfMemoryError("CUDA out of memory")
"""


@pytest.mark.long
def test_a_gpu_without_memory_for_a_reward_is_no_wrong_configuration(tmp_path):
    (tmp_path / "large.py").write_text(OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=r"rewards\.functions.*CUDA out of memory"):
        score(section(f"{tmp_path}/large.py:reward"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said"), [("def reward(:\n", "SyntaxError"), ("import sys\nsys.exit(5)\n", "exit status 5")]
)
def test_what_cannot_be_imported_is_refused_at_the_start(tmp_path, text, said):
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"rewards\.functions(.|\n)*{said}"):
        score(section(f"{tmp_path}/wrong.py:reward"))


@pytest.mark.long
def test_a_function_scores_rows_of_its_environments_alone(rewards_of):
    """`exits` would cost its worker; a row that no function scores is no failure."""
    limited = [{"environments": names} for names in (["shop"], ["maze"], None)]
    functions = [each.model_copy(update=limit) for each, limit in zip(
        rewards_of("length", "exits", "asynchronous").functions, limited, strict=True
    )]  # fmt: skip
    seen = Seen()

    async def use(pool: RewardPool) -> list[Any]:
        rows = [{"environment": "shop"}, {}]
        return [await pool.score("1+1=", COMPLETIONS, IDS, columns) for columns in rows]

    shop, single = with_pool(rewards_of().model_copy(update={"functions": functions}), use, seen)
    np.testing.assert_array_equal(shop.rewards, [[1, np.nan, 0.5], [1, np.nan, 0.5], [3, np.nan, 0.5]])
    np.testing.assert_array_equal(single.rewards, [[np.nan, np.nan, 0.5]] * 3)
    assert (shop.failures.entries(), single.failures.entries(), seen.failures) == ((), (), [])
    assert sorted(seen.calls) == ["asynchronous", "asynchronous", "length"]

    async def use_alone(pool: RewardPool) -> Any:
        return await pool.score("1+1=", COMPLETIONS, IDS, {})

    alone = with_pool(rewards_of().model_copy(update={"functions": functions[:1]}), use_alone)
    assert np.isnan(alone.rewards).all()
